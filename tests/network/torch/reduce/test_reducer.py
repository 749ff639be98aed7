"""The exchange of gradients over gloo, between real processes."""

import numpy as np
import pytest
import torch

from evenstep.network import Split, traffic_bytes
from evenstep.network._torch._reducer import ShardedReducer
from evenstep.testing import run_workers

from . import runs
from .memory import MemoryTransport, Network

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def summed():
    return run_workers(4, runs.sums)


def test_the_result_is_the_same_bit_for_bit_by_any_split(summed):
    """Of any type, with empty shares, one server for all, another split at every step."""
    assert all(all(rank["bitwise"]) for rank in summed)
    assert len(summed[0]["bitwise"]) == 4 * len(runs.SHARES)


def test_the_result_is_that_of_an_all_reduce(summed):
    """Up to the order of summation: 1e-6 in single precision, 1e-12 in double."""
    limits = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 2e-3}

    for rank in summed:
        for dtype, difference in rank["plain"].items():
            assert difference < limits[dtype]


def test_every_rank_sends_what_the_plan_says(summed):
    """The one without a share the gradients once, where a ring sends them one and a half times."""
    volume = 30_011 * 4
    for number, shares in enumerate(runs.SHARES):
        split = runs.split_of(shares, 0)
        sent, _ = traffic_bytes(split, 30_011, 4, workers=range(4))
        assert [rank["traffic"][number] for rank in summed] == list(sent)
    assert summed[3]["traffic"][1] == volume
    assert summed[3]["traffic"][0] == pytest.approx(1.5 * volume, rel=1e-3)


def test_buckets_smaller_than_the_number_of_ranks(summed):
    """Are summed like any other."""
    for rank in summed:
        assert rank["tiny"] == [[1.5] * size for size in (1, 2, 3, 5)]


def test_what_is_no_number_passes_through(summed):
    """A NaN of one rank is one on all; infinities of both signs become one."""
    for rank in summed:
        lost = np.flatnonzero(np.isnan(rank["wild"]))
        assert lost.tolist() == [7, 8, 9, 10, 1000]


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


def test_a_plan_that_comes_in_the_middle_of_a_step_is_refused(alone):
    """The buckets before went by another one."""
    alone.adopt(Split.of(np.ones(1)))
    alone.reduce(torch.ones(2), ends=False).wait()

    with pytest.raises(RuntimeError, match="came in the middle of a backward: the ranks would par"):
        alone.adopt(Split.of(np.ones(1), epoch=1))
    alone.reduce(torch.ones(2), opens=False).wait()
    alone.settle()
    alone.adopt(Split.of(np.ones(1), epoch=1))


def test_who_has_waited_for_a_bucket_may_go_on_at_once(alone):
    """With another plan, or the end."""
    for epoch in range(300):
        alone.adopt(Split.of(np.ones(1), epoch=epoch))
        alone.reduce(torch.ones(2)).wait()


def test_a_plan_of_other_ranks_is_refused(alone):
    """Servers count."""
    with pytest.raises(ValueError, match="must have a part for each of 1 ranks, got 2 parts"):
        alone.adopt(Split.of(np.array([0.5, 0.5])))


@pytest.mark.parametrize("workers", [[], [0, 0], [3], [-1], [0, 1, 2, 3]])
def test_workers_that_are_no_ranks_are_refused(workers):
    """None at all, one twice, one that does not exist: more ranks than there are."""
    with pytest.raises(
        ValueError, match=r"`ShardedReducer\(workers=...\)` must be different ranks"
    ):
        ShardedReducer(MemoryTransport(Network(), 0, 3), workers=workers)


def test_a_closed_reducer_says_so(alone):
    """As often as it is closed."""
    alone.close()
    alone.close()

    with pytest.raises(RuntimeError, match=r"The reducer was closed\. Make a new one"):
        alone.adopt(None)


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
