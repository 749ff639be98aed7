"""What a rank reports to rank 0: at once while a plan waits for it, else several steps together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import final

from ._message_kinds import HoldNothing, Message
from ._router import Router

MOST_HELD = 32
"""Steps whose reports may be held."""


@final
class HeldReports:
    """Reports of steps that are on their way to rank 0.

    Rank 0 answers steps ahead where it knows that their plans do not change. The reports of such
    steps are held until a plan needs them, a heartbeat passes, or another rank asks. On steps of
    a few milliseconds, a message of each rank in each of them would cost a tenth of the time.

    A report is made when it is sent. Between the steps of a model all code has left the processor's
    caches, so that ten reports in a row take hardly longer than one.

    Safe to use from several threads: reports leave in the order they came.

    Args:
        router: carries messages.
    """

    kinds = (HoldNothing,)

    def __init__(self, router: Router) -> None:
        self._router = router
        self._lock = threading.RLock()
        self._held: list[Callable[[], Sequence[Message]]] = []
        self._holds = True

    @property
    def num_held(self) -> int:
        """How many reports are held."""
        return len(self._held)

    def add(self, made: Callable[[], Sequence[Message]], *, may_wait: bool) -> None:
        """Hold a report, or send it after those that are held.

        Args:
            made: returns its messages.
            may_wait: whether it may be held.
        """
        with self._lock:
            self._held.append(made)
            if not (may_wait and self._holds and len(self._held) < MOST_HELD):
                self._flush()

    def flush(self) -> None:
        """Send what is held."""
        if self._held:
            with self._lock:
                self._flush()

    def received(self, peer: int, message: Message) -> None:
        """Hold nothing any more."""
        with self._lock:
            self._holds = False
            self._flush()

    def _flush(self) -> None:
        held, self._held = self._held, []
        if held:
            self._router.to_leader(*[message for made in held for message in made()])
