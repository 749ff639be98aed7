"""The sharded sum: between real processes, on threads, in DDP, with servers, in 16 bits."""

import threading
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.network import Split, traffic_bytes
from evenstep.network._torch._orders import orders, send_order
from evenstep.network._torch._pipeline import (
    FLOATS,
    BucketJob,
    Flight,
    accumulator,
    chunk_tag,
    is_pull,
    mean_in_order,
    travels_in,
)
from evenstep.network._torch._reducer import ShardedReducer
from evenstep.testing import run_workers

from . import runs
from .memory import WIDE, MemoryTransport, Network, gradients_of, on_threads


@pytest.fixture(scope="module")
def summed():
    return run_workers(4, runs.sums)


@pytest.mark.cluster
def test_the_result_is_the_same_bit_for_bit_by_any_split(summed):
    """Of any type, with empty shares, one server for all, another split at every step."""
    assert all(all(rank["bitwise"]) for rank in summed)
    assert len(summed[0]["bitwise"]) == 4 * len(runs.SHARES)


@pytest.mark.cluster
def test_the_result_is_that_of_an_all_reduce(summed):
    """Up to the order of summation: 1e-6 in single precision, 1e-12 in double."""
    limits = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 2e-3}

    for rank in summed:
        for dtype, difference in rank["plain"].items():
            assert difference < limits[dtype]


@pytest.mark.cluster
def test_every_rank_sends_what_the_plan_says(summed):
    """The one without a share the gradients once, where a ring sends them one and a half times."""
    volume = 30_011 * 4
    for number, shares in enumerate(runs.SHARES):
        split = runs.split_of(shares, 0)
        sent, _ = traffic_bytes(split, 30_011, 4, workers=range(4))
        assert [rank["traffic"][number] for rank in summed] == list(sent)
    assert summed[3]["traffic"][1] == volume
    assert summed[3]["traffic"][0] == pytest.approx(1.5 * volume, rel=1e-3)


@pytest.mark.cluster
def test_buckets_smaller_than_the_number_of_ranks(summed):
    """Are summed like any other."""
    for rank in summed:
        assert rank["tiny"] == [[1.5] * size for size in (1, 2, 3, 5)]


@pytest.mark.cluster
def test_what_is_no_number_passes_through(summed):
    """A NaN of one rank is one on all; infinities of both signs become one."""
    for rank in summed:
        lost = np.flatnonzero(np.isnan(rank["wild"]))
        assert lost.tolist() == [7, 8, 9, 10, 1000]


@pytest.mark.cluster
def test_16_bits_on_the_wire_are_the_same_on_all_ranks():
    """By any split, at half the bytes, close to the mean."""
    ranks = run_workers(4, runs.wires)
    exact = torch.stack([runs.randoms(rank, 30_011) for rank in range(4)]).double().mean(dim=0)
    total = sum(
        sum(traffic_bytes(runs.split_of(shares, 0), 30_011, 2, workers=range(4))[0])
        for shares in runs.SHARES
    )

    for wire, unit in ((torch.bfloat16, 2**-8), (torch.float16, 2**-11)):
        first = ranks[0][wire][0][0]
        for rank in ranks:
            assert all(np.array_equal(result, first) for result in rank[wire][0])
        assert sum(rank[wire][1] for rank in ranks) == total
        assert 1e-5 < abs(first - exact.numpy()).max() < 8 * unit


@pytest.fixture
def alone():
    with ShardedReducer(MemoryTransport(Network(), 0, 1)) as reducer:
        yield reducer


@pytest.mark.cluster
def test_a_plan_older_than_the_one_in_force_is_refused(alone):
    """By name; so is another of the same number, or one that comes after a return to all-reduce."""
    split = Split.of(np.ones(1), epoch=5)
    alone.adopt(split)
    alone.adopt(split)  # the same once more does no harm
    text = r"`ShardedReducer.adopt\(split\)` must be given no plan older than that of epoch 5"

    with pytest.raises(ValueError, match=text):
        alone.adopt(Split.of(np.ones(1), epoch=4))
    with pytest.raises(ValueError, match="must be of a later epoch than 5, which is in force"):
        alone.adopt(Split.of(np.ones(1), epoch=5, chunk_bytes=7))
    alone.adopt(None)
    with pytest.raises(ValueError, match=text):
        alone.adopt(Split.of(np.ones(1), epoch=4))
    assert alone.split is None


@pytest.mark.cluster
def test_a_plan_that_comes_in_the_middle_of_a_step_is_refused(alone):
    """The buckets before went by another one."""
    alone.adopt(Split.of(np.ones(1)))
    alone.reduce(torch.ones(2), ends=False).wait()

    with pytest.raises(RuntimeError, match="came in the middle of a backward: the ranks would par"):
        alone.adopt(Split.of(np.ones(1), epoch=1))
    alone.reduce(torch.ones(2)).wait()
    alone.settle()
    alone.adopt(Split.of(np.ones(1), epoch=1))


@pytest.mark.cluster
def test_who_has_waited_for_a_bucket_may_go_on_at_once(alone):
    """With another plan, or the end."""
    for epoch in range(300):
        alone.adopt(Split.of(np.ones(1), epoch=epoch))
        alone.reduce(torch.ones(2)).wait()


@pytest.mark.cluster
def test_a_plan_of_other_ranks_is_refused(alone):
    """Servers count."""
    with pytest.raises(ValueError, match="must have a part for each of 1 ranks, got 2 parts"):
        alone.adopt(Split.of(np.array([0.5, 0.5])))


@pytest.mark.cluster
def test_a_closed_reducer_says_so(alone):
    """As often as it is closed."""
    alone.close()
    alone.close()

    with pytest.raises(RuntimeError, match=r"The reducer was closed\. Make a new one"):
        alone.adopt(None)


@pytest.mark.cluster
def test_who_has_no_data_cannot_reduce_and_who_has_cannot_serve():
    """Both are told."""
    network = Network()
    with ShardedReducer(MemoryTransport(network, 1, 2), workers=[0]) as server:
        server.adopt(Split.of(np.array([0, 1.0])))
        with pytest.raises(RuntimeError, match="cannot be called: a rank without data"):
            server.reduce(torch.ones(1))
    with ShardedReducer(MemoryTransport(network, 0, 1)) as worker:
        with pytest.raises(RuntimeError, match="is for ranks without data; this one works"):
            worker.serve()
        with pytest.raises(RuntimeError, match="cannot be called: no split is in force"):
            worker.reduce(torch.ones(1))


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
    futures = [reducer.reduce(bucket, ends=i == len(sizes) - 1) for i, bucket in enumerate(buckets)]
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
            flight = Flight(job, number, (0, 1))
            tags |= {chunk_tag(flight, pull=pull) for pull in (False, True)}

    assert len(tags) == 3 * 5 * 2
    assert min(tags) > 1  # a notice's
    assert max(tags) < 1 << 30  # where orders begin


def test_memory_for_what_is_under_way_is_used_again():
    """Fifty chunks with three under way need the buffers of three, at most."""
    split = Split.of(np.array([1.0, 0, 0]), chunk_bytes=400)
    results = exchange([split], [0, 1, 2], [5000])
    pools = [reducer._pipeline.buffers for _, reducer in results]

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


LIMITS = {"float64": 1e-12, "bfloat16": 1e-2, "autocast": 1e-4}


@pytest.fixture(scope="module")
def trained():
    return run_workers(3, runs.options)


@pytest.mark.cluster
@pytest.mark.parametrize("name", runs.OPTIONS)
def test_training_by_shares_is_training_by_ddp(trained, name):
    """Four steps, by another split in each, through the rebuild of the buckets."""
    for rank in trained:
        apart, moved = rank[name]
        assert apart <= LIMITS.get(name, 1e-6)
        assert not moved < 1e-4


@pytest.mark.cluster
@pytest.mark.gpu
def test_gradients_on_a_device_go_through_the_host():
    """Two ranks share a device; gloo carries what they push and pull."""
    for apart in run_workers(2, runs.on_a_device):
        assert apart < 1e-6


@pytest.mark.cluster
def test_a_model_with_the_hook_can_be_copied_and_pickled():
    """A second hook, and a DDP over other ranks, are refused by name."""
    for works, again, wrong in run_workers(2, runs.copies):
        assert works
        assert again.startswith("`shard_gradients(ddp)` must have no communication hook yet, got r")
        assert wrong.startswith("`shard_gradients(ddp)` must be over the reducer's 2 workers, got")


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("workers", "shares"),
    [
        ([0, 1, 2], [0, 0, 0, 0.7, 0.3]),  # servers alone, unlike
        ([1, 3], [0.2, 0.3, 0.0, 0.5]),  # mixed, and the lead is not rank 0
    ],
)
def test_servers_sum_what_workers_have(workers, shares):
    """By any split the same bits, by all-reduce nearly; they leave when training ends."""
    ranks = run_workers(len(shares), runs.serve, workers, shares)
    first = ranks[workers[0]]["gradients"][0]

    for worker in workers:
        sharded, turned, plain, equal = ranks[worker]["gradients"]
        assert np.array_equal(sharded, first)
        assert np.array_equal(turned, first)
        assert np.array_equal(equal, first)
        assert abs(plain - first).max() < 1e-6
    counted = [rank["traffic"] for rank in ranks]
    sent, received = zip(*counted, strict=True)
    assert sum(sent) == sum(received)
    if shares[0] == 0:
        assert ranks[0]["sent"] == first.nbytes  # a worker that sums nothing: once, and no more


@pytest.mark.cluster
def test_an_order_by_an_older_plan_is_refused():
    """A server that is told of epoch 3 after 4 says so, and goes."""
    network = Network()
    told = orders(MemoryTransport(network, 1, 2), 0, print)
    for number, epoch in enumerate((4, 3)):
        split = Split.of(np.array([0.5, 0.5]), epoch=epoch)
        job = BucketJob(None, 10, runs.FLOATS[0], split, print, step=7)
        send_order(MemoryTransport(network, 0, 2), [1], number, job)

    first = next(told)
    assert (first.num_elements, first.wire, first.step) == (10, runs.FLOATS[0], 7)
    assert first.split == Split.of(np.array([0.5, 0.5]), epoch=4)
    with pytest.raises(ValueError, match=r"`ShardedReducer.serve\(\)` must be given no plan older"):
        next(told)


@pytest.mark.cluster
def test_a_server_alone_ends_when_the_lead_does():
    """Also where no bucket ever came, and closing once more does no harm."""
    network = Network()
    lead = ShardedReducer(MemoryTransport(network, 0, 2), workers=[0])
    server = ShardedReducer(MemoryTransport(network, 1, 2), workers=[0])
    with lead:
        thread = threading.Thread(target=server.serve, daemon=True)
        thread.start()
    thread.join(20)
    server.close()

    assert not thread.is_alive()


UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def mean_one_by_one(terms):
    """The same, an element at a time."""
    wide = WIDE[terms[0].dtype]
    means = []
    for values in zip(*(term.to(wide) for term in terms), strict=True):
        total = values[0]
        for value in values[1:]:
            total = total + value
        means.append((total / len(terms)).to(terms[0].dtype))
    return torch.stack(means)


@given(st.integers(1, 5), st.integers(1, 70), st.sampled_from(FLOATS), st.booleans())
def test_the_mean_is_that_of_one_element_after_the_other(num_terms, num_elements, dtype, reuse):
    """To the bit, with memory of its own or a term's."""
    terms = [gradients_of(rank, num_elements, dtype) for rank in range(num_terms)]
    expected = mean_one_by_one(terms)
    same = WIDE[dtype] == dtype
    scratch = torch.empty(num_elements, dtype=accumulator(dtype))
    scratch = terms[min(1, num_terms - 1)] if same and reuse else scratch

    mean_in_order(terms, scratch=scratch, out=terms[-1])

    assert torch.equal(terms[-1], expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_part_of_the_mean_is_the_mean_of_the_parts(dtype):
    """However it is cut: vector instructions, their tails and threads change nothing."""
    size = 100_003
    terms = [gradients_of(rank, size, dtype) for rank in range(4)]
    whole, pieces = torch.empty(size, dtype=dtype), torch.empty(size, dtype=dtype)
    scratch = torch.empty(size, dtype=accumulator(dtype))
    mean_in_order(terms, scratch=scratch, out=whole)
    edges = [0, 1, 6, 29, 1000, 33_333, 99_999, size]
    for begin, end in pairwise(edges):
        parts = [term[begin:end] for term in terms]
        mean_in_order(parts, scratch=scratch[begin:end], out=pieces[begin:end])

    assert torch.equal(whole, pieces)


@given(st.integers(2, 8), st.sampled_from([torch.bfloat16, torch.float16]), st.integers(0, 99))
def test_a_wire_of_16_bits_keeps_its_bound(num_workers, wire, seed):
    """That of its docstring, element by element, tiny numbers among them."""
    exact = [gradients_of(100 * seed + rank, 300) for rank in range(num_workers)]
    terms = [gradients.to(wire) for gradients in exact]
    result = torch.empty(300, dtype=wire)
    mean_in_order(terms, scratch=torch.empty(300), out=result)
    wide = torch.stack(exact).double()
    unit = UNIT[wire]
    bound = (2 * unit + unit**2 + num_workers * 2.0**-23) * wide.abs().mean(dim=0)
    bound += 2.0**-24 if wire == torch.float16 else 0.0

    assert ((result.double() - wide.mean(dim=0)).abs() <= bound).all()


def test_what_travels_in_which_numbers():
    """16 bits only where they make less of something, and never of a kind that is no gradient."""
    half = torch.bfloat16

    assert [travels_in(dtype, None) for dtype in FLOATS] == list(FLOATS)
    assert travels_in(torch.float32, half) == travels_in(torch.float64, half) == half
    assert travels_in(torch.float16, half) == torch.float16
    with pytest.raises(TypeError, match=r"Gradients of torch.int32 cannot be summed by shares"):
        travels_in(torch.int32, half)
