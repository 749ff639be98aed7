"""A rank that never comes to `prepare` is named, where torch would wait for half an hour."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from evenstep.exceptions import WorkerLostError
from evenstep.testing import run_workers
from evenstep.torch._exchange._roll_call import RollCall, roll_call


def call_of(store, rank, num_ranks=3, **settings):
    """Return one rank's part of a roll call."""
    settings = {"environment": {}, **settings}
    return RollCall(store, "evenstep/0", num_ranks=num_ranks, rank=rank, **settings)


def test_all_that_come_go_on_and_may_come_again():
    """Each balancer of a process calls the roll."""
    store = dist.HashStore()
    for _ in range(3):
        calls = [call_of(store, rank) for rank in range(3)]
        with ThreadPoolExecutor(3) as ranks:
            assert list(ranks.map(lambda call: call.wait(30.0), calls)) == [None] * 3


def test_the_wait_may_be_for_any_time():
    """As `Runtime(hang_s=math.inf)` has it, which no clock of the system can count to."""
    call_of(dist.HashStore(), 0, num_ranks=1).wait(math.inf)


@pytest.mark.parametrize(
    ("came", "named"), [((0, 1), "Rank 2 was lost"), ((0,), "Ranks 1, 2 were lost")]
)
def test_who_does_not_come_is_named(came, named):
    """By all who did, though they all came to an earlier one."""
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as ranks:
        list(ranks.map(lambda rank: call_of(store, rank).wait(30.0), range(3)))
        waiting = [ranks.submit(call_of(store, rank).wait, 0.2) for rank in came]

    for each in waiting:
        with pytest.raises(WorkerLostError, match=f"{named}.*hang_s") as caught:
            each.result()
        assert caught.value.rank == len(came)


def test_who_has_another_rank_among_all_is_named_by_both():
    """In a process group of some of the ranks, as the data-parallel one of a mesh."""
    with pytest.raises(WorkerLostError, match=r"Rank 1 \(rank 3 of all\) was lost"):
        call_of(dist.HashStore(), 0, num_ranks=2, numbers=(1, 3)).wait(0.1)


class Broken:
    """A store whose host has ended."""

    def add(self, key, amount):
        raise RuntimeError("Connection reset by peer")


class Silent:
    """A store whose host was stopped."""

    def __init__(self):
        self.gate = threading.Event()

    def add(self, key, amount):
        self.gate.wait(30)
        raise RuntimeError("too late")


def test_a_store_that_broke_names_its_host():
    """That is rank 0, unless torchrun hosts it."""
    with pytest.raises(WorkerLostError, match=r"Rank 0 was lost.*Connection reset by peer"):
        call_of(Broken(), 1).wait(30.0)
    with pytest.raises(RuntimeError, match=r"torchrun's, broke: Connection reset") as caught:
        call_of(Broken(), 1, environment={"TORCHELASTIC_USE_AGENT_STORE": "True"}).wait(30.0)
    assert not isinstance(caught.value, WorkerLostError)


def test_a_store_that_is_silent_names_its_host_in_time():
    """No call of the store's comes back."""
    store = Silent()
    with pytest.raises(WorkerLostError, match=r"Rank 0 was lost.*no answer within 0.1 s"):
        call_of(store, 1).wait(0.1)
    store.gate.set()


def absent(rank):
    """Rank 1 does not come; return what the others are told."""
    if rank == 1:
        return "elsewhere"
    try:
        roll_call(None, 0.5)
    except WorkerLostError as error:
        return str(error)
    return "all came"


@pytest.mark.cluster
def test_a_rank_that_stays_away_is_named():
    """Over the store of a real process group."""
    told = run_workers(3, absent, timeout_s=30)

    assert told[1] == "elsewhere"
    assert all("Rank 1 was lost" in told[rank] for rank in (0, 2))
