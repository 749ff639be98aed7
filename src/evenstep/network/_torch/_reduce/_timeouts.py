"""How long the issuing thread waits for a rank, and who acts when that is too long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import final

from ._transport import PeerFailed, Pending


@final
class Timeouts:
    """Waits for operations, with a thread beside that looks at the clock.

    Gloo's own timeout breaks the group in the moment it runs out, and no rank learns of which; so
    that thread acts before, while there are connections to tell the others.

    Args:
        limit_s: seconds of one wait, positive.
        give_up: called once, on the thread beside, with the rank and the seconds waited for it.
            It has to make the wait fail.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        limit_s: float,
        *,
        give_up: Callable[[int, float], None],
        clock: Callable[[], float],
    ) -> None:
        self._limit_s = limit_s
        self._give_up = give_up
        self._clock = clock
        self._waiting: tuple[int, float, float] | None = None  # for whom, since when, how long
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread beside."""
        self._thread = threading.Thread(target=self._look, name="evenstep-timeouts", daemon=True)
        self._thread.start()

    def wait(self, pending: Pending, peer: int, *, part: float = 1.0) -> None:
        """Wait for an operation with ``peer``, at most this part of the limit.

        Raises:
            PeerFailed: it failed, or was given up.
        """
        self._waiting = peer, self._clock(), part * self._limit_s
        try:
            pending.wait()
        except RuntimeError as error:
            raise PeerFailed(peer, str(error)) from error
        finally:
            self._waiting = None

    def close(self) -> None:
        """End the thread beside. May be called again."""
        self._closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None

    def _look(self) -> None:
        while not self._closing.wait(self._limit_s / 16):
            waiting = self._waiting
            if waiting is not None and (since_s := self._clock() - waiting[1]) > waiting[2]:
                self._give_up(waiting[0], since_s)
                return
