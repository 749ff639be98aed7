"""The units of each step, summed over ranks: sent at the hand-out, waited for in the backward."""

from __future__ import annotations

import math
from collections.abc import Callable

from ._message_kinds import Message, UnitsSummed, UnitsTold
from ._router import Router


class UnitSum:
    """The units of one step over all ranks.

    Attributes:
        total: the sum; None while it is not known.
    """

    def __init__(self) -> None:
        self.total: float | None = None


class UnitSums:
    """One rank's side of the sums: every rank tells rank 0, which tells all.

    One small message each way a step, sent without waiting. All ranks divide by the same bits,
    since rank 0 alone adds up.

    Args:
        router: carries messages.
        came_to: told of each step whose units this rank has told.
    """

    kinds = (UnitsTold, UnitsSummed)

    def __init__(self, router: Router, *, came_to: Callable[[int], None]) -> None:
        self._router = router
        self._came_to = came_to
        self._arrived: dict[int, dict[int, float]] = {}  # on rank 0, by step
        self._awaited: dict[int, UnitSum] = {}

    def add(self, step: int, units: float) -> UnitSum:
        """Send this rank's units of ``step``; return where the sum will be found."""
        self._awaited[step] = awaited = UnitSum()
        self._router.to_leader(UnitsTold(step, units))
        self._came_to(step)
        return awaited

    def wait(self, unit_sum: UnitSum) -> None:
        """Wait until a sum is known.

        Raises:
            WorkerLostError: a worker was lost whose units are missing.
        """
        self._router.need(lambda: unit_sum.total is not None)

    def waits_for(self, rank: int) -> int | None:
        """Return a step whose sum misses ``rank``'s message; None if there is none.

        For a rank that has left: what it sent came before its goodbye, so the rest never will.
        """
        if self._router.rank != 0:
            return min(tuple(self._awaited), default=None) if rank == 0 else None
        with self._router.changed:
            return min((k for k, known in self._arrived.items() if rank not in known), default=None)

    def received(self, peer: int, message: Message) -> None:
        """Take in units, or a sum."""
        match message:
            case UnitsTold(step, units):
                self._take(peer, step, units)
            case UnitsSummed(step, total):
                self._publish(step, total)

    def _take(self, rank: int, step: int, units: float) -> None:
        """On rank 0: take in a rank's units, and tell all ranks the sum if they are the last."""
        with self._router.changed:
            arrived = self._arrived.setdefault(step, {})
            arrived[rank] = units
            if len(arrived) < self._router.world_size:
                return
            del self._arrived[step]
        total = math.fsum(arrived.values())
        self._router.to_workers(UnitsSummed(step, total))
        self._publish(step, total)

    def _publish(self, step: int, total: float) -> None:
        awaited = self._awaited.pop(step, None)
        if awaited is not None:
            awaited.total = total
            self._router.notify()
