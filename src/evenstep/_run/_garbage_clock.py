"""How long Python's garbage collector ran, on any thread of this process."""

from __future__ import annotations

import gc
from collections.abc import Callable
from time import perf_counter
from typing import Any, final


@final
class GarbageClock:
    """Counts the time in which garbage is collected, from ``open`` to ``close``.

    A collection holds Python's lock from its begin to its end, so that one mark is enough.

    Args:
        now: a monotonic clock in seconds.
        callbacks: what Python calls at the begin and the end of a collection.

    Attributes:
        total_s: seconds in collections so far.
    """

    def __init__(
        self,
        *,
        now: Callable[[], float] = perf_counter,
        callbacks: list[Any] = gc.callbacks,
    ) -> None:
        self._now, self._callbacks = now, callbacks
        self._begun_s: float | None = None
        self.total_s = 0.0

    def open(self) -> None:
        """Begin to count."""
        self._callbacks.append(self._heard)

    def close(self) -> None:
        """Count no more."""
        if self._heard in self._callbacks:
            self._callbacks.remove(self._heard)

    def _heard(self, phase: str, _: dict[str, Any]) -> None:
        if phase == "start":
            self._begun_s = self._now()
        elif self._begun_s is not None:
            self.total_s += self._now() - self._begun_s
            self._begun_s = None
