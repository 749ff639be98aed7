"""All ranks of a balancer: who trains, who only sums gradients, by the environment too."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, Final, final

import torch.distributed as dist

from ..._private_torch import process_groups
from ...exceptions import invalid
from ._side_group import CollectiveWatch, open_side
from ._startup import WorkerFacts

if TYPE_CHECKING:
    from ...network._torch._network_settings import Network

ROLE, SWITCH, OFF = "EVENSTEP_ROLE", "EVENSTEP", "off"


def is_off() -> bool:
    """Return whether the environment leaves scripts plain."""
    return os.environ.get(SWITCH) == OFF


_ROLES: Final = ("worker", "server")
_LEAST_WORKERS = 2


@dataclass(frozen=True, slots=True)
class Said:
    """What one rank says of the roles, unchecked.

    Attributes:
        shares: whether its balancer sums gradients by shares at all.
        servers: the servers by `Network(servers=...)`; None leaves it to the environment.
        role: this rank's by the environment.
        switch: "off" where the environment leaves the script plain, and everybody trains.
    """

    shares: bool
    servers: tuple[int, ...] | None
    role: str
    switch: str = "on"


def agreed_servers(said: Sequence[Said]) -> tuple[int, ...]:
    """Return who serves, ascending: the same on every rank, or the same error.

    Args:
        said: by rank.

    Raises:
        ValueError: ranks disagree, or these cannot be the servers of so many ranks.
    """
    for rank, one in enumerate(said):
        _check_same(rank, one, said[0])
    first = said[0]
    if first.servers is not None:
        argument, servers = "Network(servers=...)", first.servers
    else:
        argument, servers = ROLE, _by_environment(said)
    if not servers:
        return ()
    if not first.shares:
        rule, got = "be set with shares of the aggregation only", f"rank {servers[0]} as a server"
        raise invalid(argument, rule, got, "Give `Balancer(network=Network())` on all ranks.")
    world_size = len(said)
    if servers[-1] >= world_size:
        rule, remedy = (
            f"be ranks below {world_size}, the number of processes",
            "Start more of them.",
        )
        raise invalid(argument, rule, servers, remedy)
    if servers[0] == 0:
        rule = "leave rank 0 to train: scripts save and log there, and a server's model stays as is"
        remedy = "Start that torchrun with another `--node-rank`."
        raise invalid(argument, rule, f"servers {servers}", remedy)
    if world_size - len(servers) < _LEAST_WORKERS:
        rule = f"leave at least {_LEAST_WORKERS} of {world_size} ranks to train"
        raise invalid(argument, rule, f"servers {servers}", "Start more workers, or fewer servers.")
    return servers


def _check_same(rank: int, mine: Said, first: Said) -> None:
    if mine.switch not in ("on", OFF):
        got = f"{mine.switch!r} on rank {rank}"
        raise invalid(SWITCH, 'be "off", "on" or left out', got, "Leave it out to balance.")
    if mine.switch != first.switch:
        got = f"{first.switch!r} on rank 0 and {mine.switch!r} on rank {rank}"
        remedy = f"Set {SWITCH}=off in the environment of all processes, or of none."
        raise invalid(SWITCH, "be the same on all ranks", got, remedy)
    if mine.role not in _ROLES:
        rule, got = 'be "worker" or "server"', f"{mine.role!r} on rank {rank}"
        raise invalid(ROLE, rule, got, "Leave it out for a worker.")
    if mine.shares != first.shares:
        rule, got = "be given on all ranks or on none", f"on rank {rank if mine.shares else 0} only"
        remedy = "Run the same script everywhere."
        raise invalid("Balancer(network=...)", rule, got, remedy)
    if mine.servers != first.servers:
        got = f"{first.servers} on rank 0 and {mine.servers} on rank {rank}"
        remedy = "Give the same, or leave it out everywhere and set the environment."
        raise invalid("Network(servers=...)", "be the same on all ranks", got, remedy)


def _by_environment(said: Sequence[Said]) -> tuple[int, ...]:
    return tuple(rank for rank, one in enumerate(said) if one.role == "server")


@final
class Crew:
    """Who is there, agreed on by all ranks. Collective: every rank of the group makes one.

    Without servers the crew is the process group, rank by rank. With them workers come first, in
    the order of their ranks, then servers. A server is by itself in whatever concerns workers
    alone: its side group and its process group have one member, so that no collective of theirs
    waits for it, nor it for them.

    Args:
        process_group: all of them; None is the default group.
        network: how gradients are summed; None is plain all-reduce.

    Attributes:
        rank, world_size: among the crew.
        num_workers: how many train.
        order: ranks of the process group, by rank of the crew.
        side: of the workers; of a server alone.
        workers: the workers' process group, that of a server alone, or as given without servers.
        all: the process group as given.

    Raises:
        ValueError: ranks disagree on who serves, or it cannot be so.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, network: Network | None) -> None:
        self._hall = open_side(process_group)
        self.all = process_group
        said = _said(network)
        try:
            servers = agreed_servers([Said(*row) for row in self._hall.collect(astuple(said))])
        except ValueError:
            self._hall.close()
            raise
        self.world_size = self._hall.world_size
        workers = [rank for rank in range(self.world_size) if rank not in servers]
        self.order = (*workers, *servers)
        self.num_workers = len(workers)
        self.rank = self.order.index(self._hall.rank)
        self.side, self.workers = self._hall, process_group
        self._unused: dist.ProcessGroup | None = None
        if servers:
            parts = [workers, *([server] for server in servers)]
            self.workers = self._part(parts)
            # A server's own is for nothing, but it keeps up the number of groups, by which torch
            # names those of a subgroup.
            self._unused = side_group = self._part(parts, backend="gloo")
            self.side = open_side(self.workers, side_group)

    @property
    def is_server(self) -> bool:
        """Whether this rank only sums."""
        return self.rank >= self.num_workers

    @property
    def num_servers(self) -> int:
        """How many ranks only sum."""
        return self.world_size - self.num_workers

    def collect(self, value: Any) -> list[Any]:
        """Return on every rank what each was called with, by rank of the crew."""
        values = self._hall.collect(value)
        return [values[rank] for rank in self.order]

    def share(self, value: Any) -> Any:
        """Return on every rank what rank 0, always a worker, was called with."""
        return self._hall.share(value)

    def hosts(self, facts: Sequence[WorkerFacts]) -> list[str]:
        """Return what errors say of where each rank runs."""
        return [
            fact.host + ", a server" * (rank >= self.num_workers) + self._global(rank)
            for rank, fact in enumerate(facts)
        ]

    def watch_by(self, watch: CollectiveWatch) -> None:
        """Have the loss of a rank noticed in all collectives that follow."""
        self._hall.watch_by(watch)
        self.side.watch_by(watch)

    def close(self) -> None:
        """End the side groups. The workers' process group stays: models continue to use it."""
        if self.side is not self._hall:
            self.side.close()
        self._hall.close()
        own, self._unused = self._unused, None
        if self.is_server and own in process_groups():
            dist.destroy_process_group(own)

    def _global(self, rank: int) -> str:
        """Return the rank that one has among all processes, where it is another one."""
        if self.world_size == 1:  # perhaps without a process group
            return ""
        number = dist.get_process_group_ranks(self.all or dist.group.WORLD)[self.order[rank]]
        return "" if number == rank else f" (rank {number} of all)"

    def _part(
        self, parts: Sequence[Sequence[int]], backend: str | None = None
    ) -> dist.ProcessGroup:
        """Return the group of the part that this rank is in.

        All ranks make all groups, where torch can number them: the name of one that only its
        members make may have been that of another, which a balancer before has closed.
        """
        everybody = dist.get_process_group_ranks(self.all or dist.group.WORLD)
        local = self.all is not None
        groups = [
            dist.new_group(
                [everybody[rank] for rank in part], backend=backend, use_local_synchronization=local
            )
            for part in parts
        ]
        mine: dist.ProcessGroup = groups[[self._hall.rank in part for part in parts].index(True)]
        return mine


def _said(network: Network | None) -> Said:
    """Return what this rank says of the roles; where it is switched off, nothing but that.

    Unchecked, because all ranks have to learn of what is invalid. A worker, and "on", by default.
    """
    if is_off():
        return Said(False, None, "worker", OFF)
    servers = None if network is None else network.servers
    role, switch = os.environ.get(ROLE) or "worker", os.environ.get(SWITCH) or "on"
    return Said(network is not None, servers, role, switch)
