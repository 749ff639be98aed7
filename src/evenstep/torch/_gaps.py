"""Waits in the user's own collectives between forwards and backwards are not own time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ._clock import StepMeter


class CollectiveCount:
    """Tells how many collectives this process has begun, over all process groups.

    Torch numbers them in each group, to compare ranks. The name is private to torch; a test holds
    it for the pinned version.
    """

    def __init__(self) -> None:
        self._groups: Any = dist.distributed_c10d._world.pg_map
        self._numbers: list[Callable[[], int]] = []

    def __call__(self) -> int:
        """Return their number; another one as well where groups were made or destroyed."""
        if len(self._groups) != len(self._numbers):
            self._numbers = [group._get_sequence_number_for_group for group in self._groups]
        total = 0
        for number in self._numbers:
            total += number()
        return total


class Gaps:
    """Leaves the time between forwards and backwards out where a collective began in it.

    As with a loss that is averaged over ranks for a log before its backward: the fast ranks wait
    there for the slow one, and all would look alike. Only the rest of such a gap is lost, such as
    the loss itself. Collectives inside a model's forward cannot be told from computing.

    Args:
        meter: measures own compute time.
        counts: whether there are other ranks to wait for.
        count: how many collectives this process has begun; None asks torch.
    """

    def __init__(
        self, meter: StepMeter, *, counts: bool, count: Callable[[], int] | None = None
    ) -> None:
        self._meter = meter
        self._count = (count or CollectiveCount()) if counts else None
        self._open: tuple[Any, int] | None = None
        self._fetch: Any = None

    def open(self) -> None:
        """Note that a gap begins: a forward or a backward is over, or a batch is handed out."""
        if self._count is not None:
            self._open = self._meter.clock.mark(), self._count()

    def close(self) -> None:
        """Note that it ends, and leave it out if a collective began in it."""
        if self._open is None or self._count is None:
            return
        (begin, before), self._open = self._open, None
        if self._count() != before:
            self._meter.exclude(begin, self._meter.clock.mark())

    def forget(self) -> None:
        """Begin anew with another step."""
        self._open = self._fetch = None

    def begin_fetch(self, *, in_step: bool) -> None:
        """Note that the loop comes back for another batch, perhaps in the middle of a step."""
        if not in_step:
            self._open = self._fetch = None
            return
        self.close()
        self._fetch = self._meter.clock.mark()

    def end_fetch(self) -> None:
        """Note that it has it: the time for that is no computing."""
        if self._fetch is not None:
            begin, self._fetch = self._fetch, None
            self._meter.exclude(begin, self._meter.clock.mark())
            self.open()
