"""What a rank reports to rank 0: kept by the thread that trains, made and sent by the channel's."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import final

from ._message_kinds import HoldNothing, Message
from ._router import Router


@final
class ReportQueue:
    """Reports of steps that are on their way to rank 0.

    The thread that trains only notes what makes a report. At a step that is due it wakes the
    channel's thread, which makes, encodes and sends what was noted, and on rank 0 plans by it. A
    heartbeat sends what was noted, too, and so does the end of the run. With one process the thread
    that trains makes each report as it comes, so that no step has to make many.

    Where a rank cannot tell which batch it has before it hears of the others', each report leaves
    at once from then on: that rank may be the one for which all wait.

    Reports leave in the order in which they came, whichever threads send them.

    Args:
        router: carries messages.
    """

    kinds = (HoldNothing,)

    def __init__(self, router: Router) -> None:
        self._router = router
        self._lock = threading.RLock()  # of who sends
        self._kept: deque[Callable[[], Sequence[Message]]] = deque()
        self._wake = router.waker(self.flush)
        self._holds = router.world_size > 1
        self._is_sending = False

    @property
    def num_held(self) -> int:
        """How many reports were noted and are not sent."""
        return len(self._kept) + self._is_sending

    def add(self, made: Callable[[], Sequence[Message]], *, is_due: bool) -> None:
        """Note a report, and have it sent with those before it if it is due.

        Args:
            made: returns its messages, on any thread.
            is_due: whether a plan waits for it.
        """
        self._kept.append(made)
        if is_due or not self._holds:
            self._wake()

    def flush(self, *, waits: bool = True) -> None:
        """Make and send what was noted.

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
