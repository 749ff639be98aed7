"""Ranks that cannot work together say so at the start, all of them."""

import threading
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from evenstep.testing import run_workers
from evenstep.torch import Balancer, Runtime
from evenstep.torch._exchange._side_group import SideGroup, open_side
from evenstep.torch._exchange._startup import WorkerFacts, addresses_of
from evenstep.torch._session import open_channel

from ..exchange.channels import rendezvous


def meet(rank, unlike):
    """Return what ranks of unlike versions raise, and whether ranks of one version meet then."""
    try:
        SideGroup.open(None, version=f"0.{rank}.0 (protocol {unlike * rank + 4})")
    except ConnectionError as error:
        side = SideGroup.open(None)
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
