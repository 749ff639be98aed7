"""The rounds of the exchange, on ranks that are threads."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.network import Split, traffic_bytes
from evenstep.network._torch._pipeline import BucketJob, Flight, chunk_tag, is_pull
from evenstep.network._torch._reducer import ShardedReducer

from .memory import WIDE, MemoryTransport, Network, gradients_of, on_threads

few = settings(max_examples=max(1, settings.default.max_examples // 2))


def exchange(splits, workers, sizes, *, dtype=torch.float32, wire=None):
    """Each split's step of buckets of these sizes; return results by rank, and what was counted."""
    world_size = splits[0].world_size
    network = Network()

    def go(rank):
        transport = MemoryTransport(network, rank, world_size)
        options = {"workers": workers, "wire": wire, "timeout_s": 20}
        with ShardedReducer(transport, **options) as reducer:
            if rank not in workers:
                reducer.serve()
                return [], reducer
            steps = [step(reducer, split, rank, sizes, dtype) for split in splits]
            return steps, reducer

    return on_threads(world_size, go)


def step(reducer, split, rank, sizes, dtype):
    """All buckets of a step at once, as a backward hands them over."""
    reducer.adopt(split)
    buckets = [gradients_of(7 * rank + i, size, dtype) for i, size in enumerate(sizes)]
    futures = [
        reducer.reduce(bucket, opens=i == 0, ends=i == len(sizes) - 1)
        for i, bucket in enumerate(buckets)
    ]
    reducer.settle()
    assert all(future.value() is bucket for future, bucket in zip(futures, buckets, strict=True))
    return buckets


def means(workers, sizes, dtype, wire):
    """What the workers should get: dull sums in their order."""
    results = []
    for index, size in enumerate(sizes):
        numbers = dtype if wire is None or dtype.itemsize == 2 else wire
        terms = [gradients_of(7 * rank + index, size, dtype).to(numbers) for rank in workers]
        total = terms[0].to(WIDE[numbers])
        for term in terms[1:]:
            total = total + term
        results.append((total / len(terms)).to(numbers).to(dtype))
    return results


@st.composite
def cases(draw):
    """Some splits for some ranks, of whom some have no data."""
    world_size = draw(st.integers(1, 4))
    num_workers = draw(st.integers(1, world_size))
    workers = sorted(draw(st.permutations(range(world_size)))[:num_workers])
    splits = []
    for epoch in range(draw(st.integers(1, 3))):
        weights = draw(st.lists(st.integers(0, 3), min_size=world_size, max_size=world_size))
        weights = np.array(weights if any(weights) else [1] * world_size)
        splits.append(
            Split.of(
                weights / weights.sum(),
                epoch=epoch,
                chunk_bytes=draw(st.integers(8, 400)),
                min_bytes=draw(st.integers(0, 40)),
            )
        )
    return splits, workers, draw(st.lists(st.integers(1, 120), min_size=1, max_size=4))


@few
@given(case=cases(), half=st.sampled_from([None, torch.bfloat16]))
def test_any_split_gives_the_mean_in_rank_order(case, half):
    """Bit for bit, for any roles, shares, chunks and buckets, one plan after the other."""
    splits, workers, sizes = case
    expected = means(workers, sizes, torch.float32, half)
    results = exchange(splits, workers, sizes, wire=half)

    for rank in workers:
        for buckets in results[rank][0]:
            assert all(torch.equal(a, b) for a, b in zip(buckets, expected, strict=True))


@few
@given(case=cases())
def test_bytes_are_those_of_the_plan(case):
    """What each rank counted, sent and received, is what the integers say."""
    splits, workers, sizes = case
    results = exchange(splits, workers, sizes)
    total = np.zeros((2, splits[0].world_size), int)
    for split in splits:
        for size in sizes:
            total += np.array(traffic_bytes(split, size, 4, workers=workers))

    assert [reducer.sent_bytes for _, reducer in results] == total[0].tolist()
    assert [reducer.received_bytes for _, reducer in results] == total[1].tolist()


class Told(MemoryTransport):
    """Notes which of the chunks' sends are pulls, in their order."""

    def __init__(self, network, rank, world_size):
        super().__init__(network, rank, world_size)
        self.pulls = []

    def send(self, buffer, target, tag):
        if buffer.dtype == torch.float32:
            self.pulls.append(is_pull(tag))
        return super().send(buffer, target, tag)


def test_the_pull_of_a_chunk_goes_out_behind_the_push_of_the_next():
    """Both directions of a link are busy, and the last chunk's sums alone go out alone."""
    split, network = Split.of(np.array([0.5, 0.5]), chunk_bytes=40, min_bytes=4), Network()

    def go(rank):
        transport = Told(network, rank, 2)
        with ShardedReducer(transport) as reducer:
            reducer.adopt(split)
            reducer.reduce(gradients_of(rank, 60))
            reducer.settle()
        return transport.pulls

    assert on_threads(2, go) == [[False, *[False, True] * 5, True]] * 2


def test_no_two_messages_under_way_have_one_tag():
    """Not of any chunk, phase or recent plan, and none that stands for something else."""
    tags = set()
    for epoch in range(3):
        job = BucketJob(None, 1, torch.float32, Split.of(np.ones(1), epoch=epoch), print)
        for number in (0, 1, 2, 1000, (1 << 21) - 1):
            flight = Flight(job, number, (0, 1), is_last=True)
            tags |= {chunk_tag(flight, pull=pull) for pull in (False, True)}

    assert len(tags) == 3 * 5 * 2
    assert min(tags) > 1  # a notice's
    assert max(tags) < 1 << 30  # where roll calls and orders begin


def test_memory_for_what_is_under_way_is_used_again():
    """Fifty chunks with three under way need the buffers of three, at most."""
    split = Split.of(np.array([1.0, 0, 0]), chunk_bytes=400)
    results = exchange([split], [0, 1, 2], [5000])
    pools = [reducer._issuer._pipeline.buffers for _, reducer in results]

    assert pools[0].num_bytes <= 3 * 2 * 400
    assert pools[1].num_bytes == 0


def test_traffic_counts_what_is_pushed_and_pulled():
    """Three chunks of 400 bytes to the server, and their sums back."""
    split = Split.of(np.array([1.0, 0]), chunk_bytes=400)
    results = exchange([split], [0, 1], [300])
    (_, server), (_, worker) = results

    assert server.sent_bytes == server.received_bytes == 1200
    assert worker.sent_bytes == worker.received_bytes == 1200


def test_a_bucket_of_gradients_that_cannot_be_summed_is_refused():
    """Before anything is sent, by name; and nothing else is disturbed."""
    with ShardedReducer(MemoryTransport(Network(), 0, 1)) as reducer:
        reducer.adopt(Split.of(np.ones(1)))
        with pytest.raises(TypeError, match=r"Gradients of torch.int64 cannot be summed by share"):
            reducer.reduce(torch.zeros(3, dtype=torch.int64))
        reducer.settle()
        assert reducer.reduce(torch.ones(3)).wait().tolist() == [1, 1, 1]
