"""What a server does in place of training: it sums, and watches for losses and the end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import final

from ..._exchange._channel import Data, StarChannel
from ..._exchange._lost_ranks import FailureWatch, lost_worker
from ..._exchange._message_kinds import (
    Answer,
    Goodbye,
    GradientsWrong,
    Message,
    MessageError,
    PlanReply,
    RankLost,
    SharesReport,
    StopRequest,
    read,
    written,
)
from ..._exchange._threads import Framework
from ...exceptions import WorkerLostError
from ._reducer import ShardedReducer
from ._reduction import Reduction


@final
class ServerWatch:
    """Receives from rank 0 what a server has to know, on the channel's thread.

    Args:
        hosts: where each rank of the crew runs, for errors.
        reducer: what the server waits in. It fails if a rank is lost; and if training has ended,
            no order comes that no more is to be summed, and nothing is on its way to a worker.
        channel: leads to rank 0.
        grace_s: seconds after a loss, and after the end, for which the main thread may still come
            out of what it waits in by itself.
        framework: whose collectives this rank may be stuck in.
        abort: ends the process with a message.

    Attributes:
        num_loops: how many loops the workers made, once their training has ended; None before.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        reducer: ShardedReducer,
        channel: StarChannel,
        *,
        grace_s: float,
        framework: Framework,
        abort: Callable[[str], None] | None = None,
    ) -> None:
        self._hosts = tuple(hosts)
        self._reducer, self._channel = reducer, channel
        self._stop_asked = False
        self._grace_s = grace_s
        self._loss = FailureWatch(grace_s=grace_s, abort=abort, is_stuck=framework.is_stuck)
        self._restart = framework.restart
        self._changed = threading.Condition()
        self._ended_s = 0.0
        self.num_loops: int | None = None
        self._done = -1
        self._thread_id = 0

    def received(self, peer: int, data: Data) -> None:
        """Take in a loss or the end; plans, and that workers went different ways, are their own."""
        try:
            messages = read(data)
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
                    self.num_loops, self._ended_s = num_loops, monotonic()
                    self._changed.notify_all()
            case PlanReply() | GradientsWrong():
                pass
            case _:
                name = type(message).__name__
                self._lose(peer, f"it sent `{name}`, which a server has no use for")

    def lost(self, peer: int, problem: str) -> None:
        """Take notice that the connection to rank 0 is gone or silent."""
        if self.num_loops is None:
            self._lose(peer, problem)

    def stop(self) -> None:
        """Have all ranks stop after a step. May be called from a signal handler."""
        self._stop_asked = True

    def tick(self) -> None:
        """Act on a loss, or on an end, that the main thread does not come by to notice."""
        if self._stop_asked:
            self._stop_asked = False
            self._channel.send(0, written([StopRequest()]))
        ended = self.num_loops is not None and self._loss.error is None
        if ended and monotonic() - self._ended_s > self._grace_s and self._reducer.is_idle:
            self._reducer.fail(RuntimeError("Training has ended."))
        self._loss.end_if_stuck(self._thread_id)

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
                lambda: self._loss.error or self.num_loops is not None, timeout=within_s
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
        self._reducer.fail(error)


_END_S = 5.0  # for the last word of rank 0's heartbeats, once there is no more to be summed
_LOOPS_TOO_MANY = 1000  # after which a script is held for one that counts steps


@final
class Service:
    """Serves in the first loop over a prepared loader; the later ones are over at once.

    Args:
        meet: meets the workers at their first step; returns where each rank runs, and a channel.
        watch_by: has the loss of a rank noticed in all collectives that follow.
        framework: whose collectives this rank may be stuck in.
        grace_s: seconds after a loss, and after the end, for which the main thread may still come
            out of what it waits in by itself.

    Attributes:
        reduction: what sums; set with the first model.
    """

    def __init__(
        self,
        meet: Callable[[], tuple[Sequence[str], StarChannel]],
        *,
        watch_by: Callable[[ServerWatch], None],
        framework: Framework,
        grace_s: float,
    ) -> None:
        self._meet = meet
        self._watch_by = watch_by
        self._framework = framework
        self._grace_s = grace_s
        self.reduction: Reduction | None = None
        self._num_loops = 0
        self._num_theirs: int | None = None  # once training has ended
        self._watch: ServerWatch | None = None  # while it serves

    def loop(self) -> None:
        """Go through a loop of the script's: one of training, of which only workers see steps.

        Raises:
            WorkerLostError: a rank was lost.
            RuntimeError: there is no model, or the workers came to no first step.
            SystemExit: this was the thousandth loop after training. Some are usual: workers stop
                early, by a loss that a server has not. So many are made by a script that counts
                steps, and would continue for ever here; exit code 0, as training went well.
        """
        self._num_loops += 1
        if self._num_theirs is None:
            self._num_theirs = self._serve()
            return
        too_many = self._num_loops - self._num_theirs
        if too_many == 1:
            logging.getLogger("evenstep").warning(
                "Training has ended after %d loops. From now on, loops of this server without data "
                "end at once, and after %d of them its process ends with exit code 0. To leave the "
                "loop instead, write `if balancer.is_server: break`.",
                self._num_theirs,
                _LOOPS_TOO_MANY,
            )
        if too_many >= _LOOPS_TOO_MANY:
            raise SystemExit(0)

    def ask_to_stop(self) -> bool:
        """Have all ranks agree to stop; return whether there is a run in which they can.

        May be called from a signal handler.
        """
        if self._watch is not None:
            self._watch.stop()
        return self._watch is not None

    def _serve(self) -> int:
        """Sum until there is no more; return how many loops the workers made."""
        reduction = self.reduction
        if reduction is None:
            raise RuntimeError("The loader runs without a model: `prepare` the model too.")
        try:
            hosts, channel = self._meet()
        except RuntimeError as error:
            raise RuntimeError(
                "The workers ended before their first step, so there is nothing to serve: see what "
                "they raised."
            ) from error
        self._watch = watch = ServerWatch(
            hosts, reduction.reducer, channel, framework=self._framework, grace_s=self._grace_s
        )
        channel.start(watch)
        self._watch_by(watch)
        try:
            _serve_with_signals(reduction, lambda seen: channel.send(0, written([seen])))
        except RuntimeError as error:
            if isinstance(error, WorkerLostError) and error.rank != 0:
                raise
            if (lost := watch.verdict(within_s=_END_S)) is not None:
                raise lost from (error if lost is not error else error.__cause__)
            # Of an end without a last order, as of a script that destroyed its groups first.
            if watch.num_loops is None:
                raise
        else:
            watch.verdict(within_s=_END_S)
            watch.check()  # the last order may overtake the news of an error that came before it
        finally:
            self._watch = None
            channel.close()
        return watch.num_loops or self._num_loops


def _serve_with_signals(reduction: Reduction, send: Callable[[SharesReport], None]) -> None:
    """Serve on a thread of its own, as long as that takes.

    A thread that waits in gloo receives no signal, and the next order may be far away: neither a
    notice to stop nor Ctrl-C would be received.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="evenstep-serve") as thread:
        serving = thread.submit(reduction.serve, send)
        try:
            serving.result()
        except BaseException as error:
            reduction.reducer.fail(error)  # ends the thread's wait, where that is not over
            raise
