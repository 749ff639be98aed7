"""What a rank reports to rank 0: kept by the thread that trains, made and sent by the channel's."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import final

from ._message_kinds import HoldNothing, Message
from ._router import Router

MOST_HELD = 32
"""Steps whose reports may be held."""


@final
class Reports:
    """Reports of steps that are on their way to rank 0.

    The thread that trains only notes what makes a report. Where rank 0 waits for it, it wakes the
    channel's thread, which makes, encodes and sends what was noted, and on rank 0 plans by it. With
    one process that is the thread that trains.

    Rank 0 answers steps ahead where it knows that their plans do not change. The reports of such
    steps are held until a plan needs them, a heartbeat passes, or another rank asks. On steps of
    a few milliseconds, a message of each rank in each of them would cost a tenth of the time.

    Reports leave in the order in which they came, whichever threads send them.

    Args:
        router: carries messages.
    """

    kinds = (HoldNothing,)

    def __init__(self, router: Router) -> None:
        self._router = router
        self._lock = threading.RLock()  # of who sends
        self._kept: deque[Callable[[], Sequence[Message]]] = deque()
        self._holds = True
        self._is_sending = False

    @property
    def num_held(self) -> int:
        """How many reports are held, or are being sent."""
        return len(self._kept) + self._is_sending

    def add(self, made: Callable[[], Sequence[Message]], *, may_wait: bool) -> None:
        """Hold a report, or have it sent after those that are held.

        Args:
            made: returns its messages, on any thread.
            may_wait: whether it may be held.
        """
        self._kept.append(made)
        if not (may_wait and self._holds and len(self._kept) < MOST_HELD):
            self._router.soon(self.flush)

    def flush(self, *, waits: bool = True) -> None:
        """Make and send what is held.

        Args:
            waits: whether to wait for another thread that is at it.
        """
        if not self._lock.acquire(blocking=waits):
            return
        try:
            self._is_sending = True
            messages: list[Message] = []
            while self._kept:
                messages += self._kept.popleft()()
            if messages:
                self._router.to_leader(*messages)
        finally:
            self._is_sending = False
            self._lock.release()

    def received(self, peer: int, message: Message) -> None:
        """Hold nothing any more."""
        self._holds = False
        self.flush()
