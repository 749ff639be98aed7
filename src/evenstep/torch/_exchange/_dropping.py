"""Sends a worker away that costs more than it brings, where the others can go on without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..._exchange._stop import Stop
from ...events import Event, Hook, WorkerDropped, WorkerKept, WorkerUnhelpful
from ._startup import WorkerFacts


class Dropping:
    """A hook of rank 0's, between what notices an unhelpful worker and the sinks.

    Args:
        emit: takes every event.
        facts: of every rank.
        stop: how all ranks come to stop, once there is a way.
        least: workers that have to be left; None to drop none.
        has_peers: whether ranks hold parts of one copy of the model.
        has_servers: whether there are ranks without data, which no launcher would start anew.
    """

    def __init__(
        self,
        emit: Hook,
        facts: Sequence[WorkerFacts],
        *,
        stop: Callable[[], Stop],
        least: Callable[[], int | None],
        has_peers: bool,
        has_servers: bool = False,
    ) -> None:
        self._emit = emit
        self._facts = tuple(facts)
        self._stop = stop
        self._least = least
        self._has_peers, self._has_servers = has_peers, has_servers

    def __call__(self, event: Event) -> None:
        """Pass ``event`` on, and act if it names an unhelpful worker."""
        self._emit(event)
        least = self._least()
        if not isinstance(event, WorkerUnhelpful) or least is None:
            return
        step, rank = event.step, event.rank
        obstacle = self._obstacle(rank, least)
        if not obstacle and not self._stop().send_away(rank):
            obstacle = "the run stops already, for another reason"
        if obstacle:
            self._emit(WorkerKept(step, rank, obstacle))
            return
        self._emit(WorkerDropped(step, rank, self._facts[rank].host))

    def _obstacle(self, rank: int, least: int) -> str:
        """Return why the others could not go on without ``rank``; nothing if they could."""
        left = len(self._facts) - 1
        beside = self._facts[rank].beside
        spent = [other for other, fact in enumerate(self._facts) if fact.num_restarts < 1]
        if left < least:
            return f"{left} workers would be left, fewer than the minimum of {least}"
        if self._has_peers:
            return "it holds a part of a copy of the model"
        if self._has_servers:
            return "no launcher would restart the servers without data"
        if beside == 0:
            return (
                "its process is not a child of torchrun, which is needed to remove it and restart "
                "the others. Leave it out of the next start"
            )
        if beside > 1:
            return f"its torchrun has {beside} workers, and would leave with all of them"
        if spent:
            return f"the torchrun of rank {spent[0]} has no restart left (`--max-restarts`)"
        return ""
