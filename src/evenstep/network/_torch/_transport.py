"""What carries tensors between two ranks, over gloo, and how long a rank is waited for."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import Any, final

import torch
import torch.distributed as dist


class PeerFailed(RuntimeError):
    """An operation with a rank failed: it is gone, or something in between is.

    Attributes:
        peer: the rank, of the transport's group.
    """

    def __init__(self, peer: int, problem: str) -> None:  # the class says it
        super().__init__(problem)
        self.peer = peer


Pending = Callable[[float | None], None]
"""Waits until an operation is done, or fails after so many seconds; None is never.

It raises a RuntimeError if the operation failed, as when the peer is gone or the transport broken
off. Where it fails after its seconds, perhaps everything else fails with it.
"""


class AbstractTransport(abc.ABC):
    """Sends tensors to other ranks of a group and receives from them, without waiting.

    Ranks are those of the group. Operations between two ranks are matched by their tag. Tensors lie
    in host memory.

    Attributes:
        rank, world_size: of the group.
    """

    rank: int
    world_size: int

    @abc.abstractmethod
    def receive(self, buffer: torch.Tensor, source: int, tag: int) -> Pending:
        """Receive into ``buffer``, contiguous and left alone until it is waited for.

        Raises:
            PeerFailed: the peer is known to have failed.
        """

    @abc.abstractmethod
    def send(self, buffer: torch.Tensor, target: int, tag: int) -> Pending:
        """Send ``buffer``, contiguous and left alone until it is waited for.

        Raises:
            PeerFailed: the peer is known to have failed.
        """

    @abc.abstractmethod
    def break_off(self) -> None:
        """Make everything that waits fail now, here and on the ranks at the other ends, for good.

        From any thread. May be called again.
        """


_FOR_EVER = timedelta(days=365)
_BREAK = (1 << 31) - 1  # a tag that no rank sends with


@final
class GlooTransport(AbstractTransport):
    """Sends and receives over a gloo process group, matched by tag.

    Nothing is waited for longer than a timeout allows: a wait that runs into gloo's own
    timeout breaks the whole group before any rank could learn why. ``Timeouts`` keeps the time.

    Args:
        group: of this transport alone: it is broken when a rank is lost.
        order: which rank of the group each rank of the transport is; None is the same one.
    """

    def __init__(self, group: dist.ProcessGroup, *, order: Sequence[int] | None = None) -> None:
        self._group = group
        self._order = tuple(range(group.size()) if order is None else order)
        self.rank = self._order.index(group.rank())
        self.world_size = group.size()

    def receive(self, buffer: torch.Tensor, source: int, tag: int) -> Pending:
        return self._begun(self._group.recv, buffer, source, tag)

    def send(self, buffer: torch.Tensor, target: int, tag: int) -> Pending:
        return self._begun(self._group.send, buffer, target, tag)

    def _begun(
        self, begin: Callable[..., Any], buffer: torch.Tensor, peer: int, tag: int
    ) -> Pending:
        try:
            work = begin([buffer], self._order[peer], tag)
        except RuntimeError as error:  # gloo refuses what is asked of a connection that is closed
            raise PeerFailed(peer, str(error)) from error
        return partial(_wait_for, work, buffer)

    def break_off(self) -> None:
        """Let a receive time out that no rank sends to: gloo then closes every connection.

        A hack. `ProcessGroup.abort` does nothing for gloo (torch 2.13), a wait of another thread
        cannot be interrupted, and a group that is destroyed under one takes the process along.
        """
        for peer in range(self.world_size):
            if peer != self._group.rank():
                with suppress(RuntimeError):
                    self._group.recv([torch.zeros(1)], peer, _BREAK).wait(timedelta(milliseconds=1))


def _wait_for(work: Any, buffer: torch.Tensor, limit_s: float | None) -> None:
    """Wait for a work of gloo's; who holds this wait holds the tensor, which must outlive it."""
    work.wait(_FOR_EVER if limit_s is None else timedelta(seconds=limit_s))


@final
class Timeouts:
    """Waits for operations, with a thread beside that looks at the clock.

    Gloo's own timeout breaks the group in the moment it runs out, and no rank learns of which; so
    that thread acts before, while there are connections by which to notify the others.

    Args:
        limit_s: seconds of one wait, positive.
        give_up: called once, on the thread beside, with the rank and the seconds waited for it.
            It has to make the wait fail.
    """

    def __init__(self, limit_s: float, *, give_up: Callable[[int, float], None]) -> None:
        self._limit_s = limit_s
        self._give_up = give_up
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
        self._waiting = peer, monotonic(), part * self._limit_s
        try:
            pending(None)
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
            if waiting is not None and (since_s := monotonic() - waiting[1]) > waiting[2]:
                self._give_up(waiting[0], since_s)
                return
