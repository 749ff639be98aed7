"""What a server does in place of training: it sums until the workers' training has ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import final

from ..._exchange._channel import StarChannel
from ..._exchange._message_kinds import SharesSeen, StopAsked, written
from ..._exchange._place import Framework
from ...exceptions import WorkerLostError
from ._reduction import Reduction
from ._server_watch import ServerWatch

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
                steps, and would go on for ever here; exit code 0, as training went well.
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
        hosts, channel = self._met()
        self._watch = watch = ServerWatch(
            hosts,
            framework=self._framework,
            fail=reduction.reducer.fail,
            ask=lambda: channel.send(0, written([StopAsked()])),
            end=lambda: reduction.reducer.fail(RuntimeError("Training has ended.")),
            is_idle=lambda: reduction.reducer.is_idle,
            grace_s=self._grace_s,
        )
        channel.start(watch)
        self._watch_by(watch)
        try:
            _hearing_signals(reduction, lambda seen: channel.send(0, written([seen])))
        except RuntimeError as error:
            if isinstance(error, WorkerLostError) and error.rank != 0:
                raise
            if (lost := watch.verdict(within_s=_END_S)) is not None:
                raise lost from (error if lost is not error else error.__cause__)
            # Of an end without a last order, as of a script that destroyed its groups first.
            if watch.ended(within_s=0.0) is None:
                raise
        else:
            watch.verdict(within_s=_END_S)
            watch.check()  # the last order may overtake the news of an error that came before it
        finally:
            self._watch = None
            channel.close()
        return watch.ended(within_s=0.0) or self._num_loops

    def _met(self) -> tuple[Sequence[str], StarChannel]:
        """Meet the workers at their first step, and connect with rank 0."""
        try:
            return self._meet()
        except RuntimeError as error:
            raise RuntimeError(
                "The workers ended before their first step, so there is nothing to serve: see what "
                "they raised."
            ) from error


def _hearing_signals(reduction: Reduction, send: Callable[[SharesSeen], None]) -> None:
    """Serve on a thread of its own, as long as that takes.

    A thread that waits in gloo is told of no signal, and the next order may be far away: no notice
    to stop would be heard, nor Ctrl-C.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="evenstep-serve") as thread:
        serving = thread.submit(reduction.serve, send)
        try:
            serving.result()
        except BaseException as error:
            reduction.reducer.fail(error)  # ends the thread's wait, where that is not over
            raise
