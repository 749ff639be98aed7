"""The balancer's own collectives, in which a loss of a worker is noticed as in a backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

_VERDICT_S = 2.0


class CollectiveWatch(Protocol):
    """Hears of losses while a thread cannot."""

    def check(self) -> None:
        """Raise if a worker was lost."""

    def enter_collective(self) -> bool:
        """Note that the calling thread goes into a collective; return if it was in none."""

    def leave_collective(self) -> None:
        """Note that it is back."""

    def verdict(self, *, within_s: float) -> Exception | None:
        """Return the loss of a worker, if one becomes known in time."""


class Bracket:
    """Goes around a collective of the balancer's own: ``with bracket():``.

    A process that is stuck in there with a lost worker is ended, as in a backward; where the
    collective breaks, the error names the worker.

    Attributes:
        watch: who hears of losses; None before a run is open, when there is none.
    """

    def __init__(self) -> None:
        self.watch: CollectiveWatch | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Note for the time of the block that the calling thread is in a collective.

        Raises:
            WorkerLostError: a worker was lost, before or meanwhile.
        """
        watch = self.watch
        if watch is None:
            yield
            return
        watch.check()
        # A sharded model's is noted from its last forward to its backward's end.
        was_outside = watch.enter_collective()
        try:
            yield
        except RuntimeError as error:
            lost = watch.verdict(within_s=_VERDICT_S)
            if lost is None:
                raise
            raise lost from error
        finally:
            if was_outside:
                watch.leave_collective()
