"""Which steps all ranks have reported: what a rank waits for before it ends its run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import final

from ._channel import StarChannel
from ._wire import Message


@final
class Completed:
    """One rank's side of it: rank 0 knows, and tells a rank that asks.

    An answer to a step says nothing of that: plans are known ahead, or asked for ahead.

    Args:
        rank: this process.
        channel: connections to the others; None with one process.
        changed: notified when there is news, and by the owner when a worker is lost or leaves.
        is_over: whether none will come any more, as a worker was lost or rank 0 has ended its run.

    Attributes:
        newest: the newest step that all ranks have reported, as far as this rank has heard.
    """

    def __init__(
        self,
        rank: int,
        channel: StarChannel | None,
        changed: threading.Condition,
        *,
        is_over: Callable[[], bool],
    ) -> None:
        self._rank = rank
        self._channel = channel
        self._changed = changed
        self._is_over = is_over
        self.newest = -1
        self._asking: dict[int, int] = {}  # on rank 0: who waits for which step

    def put(self, step: int) -> None:
        """Take in that all ranks have reported ``step``."""
        with self._changed:
            self.newest = max(self.newest, step)
            self._changed.notify_all()
            known = [rank for rank, asked in self._asking.items() if asked <= self.newest]
            for rank in known:
                del self._asking[rank]
        for rank in known:
            self._tell(rank)

    def wait(self, step: int, *, limit_s: float) -> None:
        """Wait until all ranks have reported ``step``, at most ``limit_s``."""
        if self._rank != 0 and self._channel is not None:
            self._channel.send(0, {"is_complete": step})
        with self._changed:
            self._changed.wait_for(lambda: self.newest >= step or self._is_over(), timeout=limit_s)

    def received(self, peer: int, message: Message) -> bool:
        """Take in a question or its answer; return whether it was one."""
        match message:
            case {"is_complete": step}:
                with self._changed:
                    self._asking[peer] = step
                self.put(self.newest)
            case {"complete": step}:
                self.put(step)
            case _:
                return False
        return True

    def _tell(self, rank: int) -> None:
        assert self._channel is not None
        self._channel.send(rank, {"complete": self.newest})
