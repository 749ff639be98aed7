"""Who trains and who only sums gradients: said by each rank, agreed on by all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ...exceptions import invalid
from ._environment import OFF, ROLE, SWITCH

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
