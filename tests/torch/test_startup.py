"""Ranks that cannot work together, or never come, are named at the start, by all of them."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from evenstep.exceptions import WorkerLostError
from evenstep.testing import run_workers
from evenstep.torch import Balancer, Runtime
from evenstep.torch._exchange._side_group import Bracket, SideGroup, open_side
from evenstep.torch._exchange._startup import WorkerFacts, addresses_of, await_all, roll_call
from evenstep.torch._session import open_channel

from ..exchange.exchanges import alone, rendezvous


def meet(rank, unlike):
    """Return what ranks of unlike versions raise, and whether ranks of one version meet then."""
    try:
        SideGroup(None, version=f"0.{rank}.0 (protocol {unlike * rank + 4})")
    except ConnectionError as error:
        side = SideGroup(None)
        return str(error), side.collect(rank)


@pytest.mark.cluster
@pytest.mark.parametrize("unlike", [0, 1], ids=["package", "protocol"])
def test_unlike_versions_are_refused_on_all_ranks(unlike):
    """Before any of them reads what another one wrote, and with both versions."""
    (one, met), (other, _) = run_workers(2, meet, unlike)

    assert one == other
    assert f"0.0.0 (protocol 4) on rank 0 and 0.1.0 (protocol {unlike + 4}) on rank 1" in one
    assert met == [0, 1]


@pytest.mark.parametrize("value", ["", "auto", "1"])
def test_a_single_process_starts_whatever_the_environment_has(monkeypatch, value):
    """What no launcher sets says nothing of other processes."""
    monkeypatch.setenv("WORLD_SIZE", value)

    assert open_side(None).world_size == 1


def test_several_processes_without_a_process_group_are_refused(monkeypatch):
    """Each would train alone."""
    monkeypatch.setenv("WORLD_SIZE", "2")

    with pytest.raises(RuntimeError, match=r"A launcher started 2 processes.*init_process_group"):
        open_side(None)


def elsewhere(rank):
    """Prepare with an address of rank 0 that no name server knows; return the error."""
    stock = DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4)
    balancer = Balancer(runtime=Runtime(address="nowhere.invalid", line_every=None))
    try:
        balancer.prepare(nn.Linear(4, 4), stock)
    except ConnectionError as error:
        return str(error)
    return "nothing happened"


@pytest.mark.cluster
def test_a_rank_that_cannot_reach_rank_zero_ends_the_start_on_all():
    """With its own words: rank 0 does not wait for it, and knows why."""
    first, other = run_workers(2, elsewhere, timeout_s=90)

    assert first == other
    assert first.startswith("Rank 1 cannot reach rank 0 on port ")
    assert "tried nowhere.invalid: " in first
    assert "`Runtime(address=...)`" in first


class Ranks:
    """A rank that is a thread, and what rank 0 has told it."""

    world_size = 2

    def __init__(self, rank, share):
        self.rank, self._share, self.shared = rank, share, None

    def share(self, value):
        self.shared = self._share(value)
        return self.shared

    def collect(self, value):
        return [value]


@pytest.mark.parametrize(
    ("environment", "networks", "address", "expected"),
    [
        ("lo,eth9", ("one", "other"), None, ("127.0.0.1",)),
        ("eth9", ("one", "one"), None, ("127.0.0.1",)),
        ("eth9", ("one", "other"), "127.0.0.1", ("127.0.0.1",)),
        ("eth9", ("one", "one"), "lo", ("127.0.0.1",)),
        ("", ("one", "other"), None, ("localhost",)),
    ],
)
def test_rank_zero_is_reached_where_it_was_said(
    monkeypatch, environment, networks, address, expected
):
    """By the argument, else by the loopback if that will do, else by gloo's first interface."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", environment)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    here = WorkerFacts.here(torch.device("cpu"), lag=0)
    facts = [replace(here, network=network) for network in networks]
    runtime, share, channels = Runtime(address=address), rendezvous(2), []
    ranks = [Ranks(rank, share) for rank in (0, 1)]

    def join(one):
        channels.append(open_channel(one, runtime, addresses_of(facts)))

    threads = [threading.Thread(target=join, args=(one,)) for one in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for channel in channels:
        channel.close()

    assert ranks[1].shared["addresses"][:1] == expected


def come(store, rank, limit_s, *, ranks=(0, 1, 2)):
    """Be one rank of a roll call."""
    await_all(store, "evenstep/0", rank, ranks, limit_s)


def test_all_that_come_go_on_and_may_come_again():
    """Each balancer of a process calls the roll."""
    store = dist.HashStore()
    for _ in range(3):
        with ThreadPoolExecutor(3) as ranks:
            assert list(ranks.map(lambda rank: come(store, rank, 30.0), range(3))) == [None] * 3


def test_the_wait_may_be_for_any_time():
    """As `Runtime(hang_s=math.inf)` has it, which no clock of the system can count to."""
    come(dist.HashStore(), 0, math.inf, ranks=(0,))


@pytest.mark.parametrize(
    ("came", "named"), [((0, 1), "Rank 2 was lost"), ((0,), "Ranks 1, 2 were lost")]
)
def test_who_does_not_come_is_named(came, named):
    """By all who did, though they all came to an earlier one."""
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as ranks:
        list(ranks.map(lambda rank: come(store, rank, 30.0), range(3)))
        waiting = [ranks.submit(come, store, rank, 0.2) for rank in came]

    for each in waiting:
        with pytest.raises(WorkerLostError, match=f"{named}.*hang_s") as caught:
            each.result()
        assert caught.value.rank == len(came)


def test_who_has_another_rank_among_all_is_named_by_both():
    """In a process group of some of the ranks, as the data-parallel one of a mesh."""
    with pytest.raises(WorkerLostError, match=r"Rank 1 \(rank 3 of all\) was lost"):
        come(dist.HashStore(), 0, 0.1, ranks=(1, 3))


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


def test_a_store_that_broke_names_its_host(monkeypatch):
    """That is rank 0, unless torchrun hosts it."""
    with pytest.raises(WorkerLostError, match=r"Rank 0 was lost.*Connection reset by peer"):
        come(Broken(), 1, 30.0)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(RuntimeError, match=r"torchrun's, broke: Connection reset") as caught:
        come(Broken(), 1, 30.0)
    assert not isinstance(caught.value, WorkerLostError)


def test_a_store_that_is_silent_names_its_host_in_time():
    """No call of the store's comes back."""
    store = Silent()
    with pytest.raises(WorkerLostError, match=r"Rank 0 was lost.*no answer within 0.1 s"):
        come(store, 1, 0.1)
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


def break_by_closing(other):
    """Be the collective that a rank left."""
    other.close()
    raise RuntimeError("port 4711")


def test_a_collective_of_the_balancers_own_names_who_broke_it():
    """Before a run is open its error stays as it is; later it is the loss that is behind it."""
    exchange, other = alone()
    bracket = Bracket()
    with pytest.raises(RuntimeError, match="port 4711"), bracket():
        raise RuntimeError("port 4711")
    bracket.watch = exchange.lost_ranks

    with pytest.raises(WorkerLostError, match="Rank 1 on b was lost") as caught, bracket():
        break_by_closing(other)  # in here: a loss known before needs no broken collective
    assert str(caught.value.__cause__) == "port 4711"
    with pytest.raises(WorkerLostError), bracket():  # known before: nobody goes in
        pytest.fail("a collective without the lost worker never ends")
    assert exchange.lost_ranks.verdict(within_s=0) is None, "it is outside again"
    exchange.close()


def test_a_collective_inside_of_another_leaves_that_one_noted():
    """As between the forward and the backward of a sharded model."""
    exchange, other = alone()
    bracket = Bracket()
    bracket.watch = exchange.lost_ranks
    exchange.lost_ranks.enter_collective()
    with bracket():
        pass

    other.close()
    assert exchange.lost_ranks.verdict(within_s=5).rank == 1
    exchange.close()
