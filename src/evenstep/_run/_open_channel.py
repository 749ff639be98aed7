"""How a rank gets its connections with the others, in every framework."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from .._exchange._channel import StarChannel
from .._exchange._meeting import connect_star
from ._runtime import AbstractRuntime


class AllRanks(Protocol):
    """All ranks, servers included, while a framework's own means connect them alone."""

    rank: int
    world_size: int

    def share(self, value: Any) -> Any:
        """Return on every rank what rank 0 was called with."""

    def collect(self, value: Any) -> list[Any]:
        """Return on every rank what each rank was called with, in order."""


def open_channel(
    ranks: AllRanks,
    runtime: AbstractRuntime,
    addresses: Sequence[str],
    *,
    timeout_s: float = 60.0,
) -> StarChannel | None:
    """Connect every rank with rank 0; None with one process. Collective."""
    if ranks.world_size == 1:
        return None
    peers = connect_star(
        ranks.rank,
        ranks.world_size,
        ranks.share,
        collect=ranks.collect,
        addresses=addresses if runtime.address is None else [runtime.address],
        ports=runtime.listening_ports,
        timeout_s=timeout_s,
    )
    return StarChannel(peers, heartbeat_s=runtime.heartbeat_s, deadline_s=runtime.deadline_s)
