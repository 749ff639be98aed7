"""A server's side of the heartbeats: who was lost, and when the workers' training has ended."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, final

from ..._exchange._loss_watch import LossWatch, lost_worker
from ..._exchange._message_kinds import (
    Answer,
    Goodbye,
    LossRefused,
    Message,
    PlanTold,
    RankLost,
    RanksDiverged,
    read,
)
from ..._exchange._place import Framework
from ..._exchange._record import MessageError
from ...exceptions import WorkerLostError


@final
class ServerWatch:
    """Hears from rank 0 what a server has to know, on the channel's thread.

    Args:
        hosts: where each rank of the crew runs, for errors.
        fail: called once with the loss of a rank; it has to end what the server waits in.
        ask: tells rank 0 to have all stop.
        end: called if training has ended and no order comes that no more is to be summed.
        is_idle: tells whether nothing is being summed, nor on its way to a worker.
        grace_s: seconds after a loss, and after the end, for which the main thread may still come
            out of what it waits in by itself.
        framework: whose collectives this rank may be stuck in.
        abort: ends the process with a message.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        fail: Callable[[WorkerLostError], object],
        ask: Callable[[], object],
        end: Callable[[], object],
        is_idle: Callable[[], bool],
        grace_s: float,
        framework: Framework,
        abort: Callable[[str], None] | None = None,
    ) -> None:
        self._hosts = tuple(hosts)
        self._fail, self._ask, self._end, self._is_idle = fail, ask, end, is_idle
        self._told = False
        self._grace_s = grace_s
        self._loss = LossWatch(grace_s=grace_s, abort=abort, is_stuck=framework.is_stuck)
        self._restart = framework.restart
        self._changed = threading.Condition()
        self._ended_s = 0.0
        self._num_loops: int | None = None
        self._done = -1
        self._thread_id = 0

    def received(self, peer: int, rows: Any) -> None:
        """Take in a loss or the end; plans, and that workers went different ways, are their own."""
        try:
            messages = read(rows)
        except MessageError as error:
            self._lose(peer, f"it sent what a server cannot read: {error}")
            return
        for message in messages:
            self._take(peer, message)

    def _take(self, peer: int, message: Message) -> None:
        match message:
            case RankLost(rank, problem, done):
                self._done = done
                self._lose(rank, problem)
            case Goodbye(failed=(rank, problem)):
                self._lose(rank, problem)
            case Answer(done=done):
                self._done = done
            case Goodbye(num_loops=num_loops):
                with self._changed:
                    self._num_loops, self._ended_s = num_loops, monotonic()
                    self._changed.notify_all()
            case PlanTold() | RanksDiverged() | LossRefused():
                pass
            case _:
                name = type(message).__name__
                self._lose(peer, f"it sent `{name}`, which a server has no use for")

    def lost(self, peer: int, problem: str) -> None:
        """Take notice that the connection to rank 0 is gone or silent."""
        if self._num_loops is None:
            self._lose(peer, problem)

    def stop(self) -> None:
        """Have all ranks stop after a step. May be called from a signal handler."""
        self._told = True

    def tick(self) -> None:
        """Act on a loss, or on an end, that the main thread does not come by to hear of."""
        if self._told:
            self._told = False
            self._ask()
        ended = self._num_loops is not None and self._loss.error is None
        if ended and monotonic() - self._ended_s > self._grace_s and self._is_idle():
            self._end()
        self._loss.end_if_stuck(self._thread_id)

    def ended(self, *, within_s: float) -> int | None:
        """Return how many loops the workers made, if their training ends in time, else None."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_loops is not None, timeout=within_s)
            return self._num_loops

    def check(self) -> None:
        """Raise if a rank was lost.

        Raises:
            WorkerLostError: a rank was lost.
        """
        self._loss.check()

    def enter_collective(self) -> bool:
        """Note that the calling thread goes into a collective; return if it was in none."""
        self._thread_id = threading.get_ident()
        return self._loss.enter_collective()

    def leave_collective(self) -> None:
        """Note that it is back."""
        self._loss.leave_collective()

    def verdict(self, *, within_s: float) -> Exception | None:
        """Return the loss of a rank, if one becomes known in time."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._loss.error or self._num_loops is not None, timeout=within_s
            )
        return self._loss.error

    def _lose(self, rank: int, problem: str) -> None:
        if self._loss.error is not None:
            return
        host, restart = self._hosts[rank], self._restart
        error = lost_worker(rank, host, problem, done=self._done, restart=restart)
        with self._changed:
            self._loss.note(error)
            self._changed.notify_all()
        logging.getLogger("evenstep").critical("%s", error)
        self._fail(error)
