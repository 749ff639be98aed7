"""What the data and the graph hold before a run is open, and pass everything on to after."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from .._exchange._exchange import Exchange
from .._planner import Learnt, Plan
from ._alone import Alone
from ._conductor import StepConductor
from ._drift import Row
from ._run import Run
from ._service import lost_behind
from ._workers import Workers

_VERDICT_S = 2.0
_OF_COLLECTIVES = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.InternalError,
    tf.errors.UnavailableError,
)


class RunLink:
    """Opens the run at its first step, and remembers errors that TensorFlow keeps the text of.

    Args:
        open_run: opens it, on all workers together; with one worker, there is a stand-in.
        workers: who trains together.

    Attributes:
        forwarding: name of the model whose forward is being traced; None outside of one.
        is_resting: whether forwards are none of training just now.
    """

    def __init__(self, open_run: Callable[[], Run | Alone], workers: Workers) -> None:
        self._open_run = open_run
        self._workers = workers
        self._run: Run | Alone | None = None
        self._failure: Exception | None = None
        self._ended_by: BaseException | None = None
        self._closed = False
        self.forwarding: str | None = None
        self.is_resting = False

    @property
    def is_open(self) -> bool:
        """Whether the run has begun."""
        return self._run is not None

    @property
    def plan(self) -> Plan | None:
        """The plan of the newest step; None before the first."""
        return None if self._run is None else self._run.conductor.plan

    @property
    def num_done(self) -> int | None:
        """Steps done in the run; None before the first."""
        return None if self._run is None else self._run.conductor.num_done

    @property
    def learnt(self) -> Learnt | None:
        """What the planner has learnt, on rank 0."""
        exchange = self._exchange
        return None if exchange is None else exchange.decisions.learnt()

    @property
    def num_samples(self) -> int:
        """Samples of the step under way over all workers; 0 outside of one."""
        return 0 if self._steps is None else self._steps.num_samples

    def conductor(self) -> StepConductor | Alone:
        """Return what hands out steps; the first call opens the run."""
        self.check_open()
        if self._run is None:
            self._run = self._open_run()
        return self._run.conductor

    def compare(self, rows: list[Row]) -> None:
        """Compare what workers have read in an epoch, if there are several."""
        if isinstance(self._run, Run):
            self._run.compare(rows)

    def begin_forward(self) -> float:
        """Pass a forward on; return its weight."""
        return 1.0 if self._steps is None else self._steps.begin_forward()

    def begin_work(self) -> None:
        """Pass on that what comes now is this worker's own."""
        if self._steps is not None:
            self._steps.begin_work()

    def end_work(self) -> None:
        """Pass on that it is over."""
        if self._steps is not None:
            self._steps.end_work()

    def gradients_done(self) -> None:
        """Pass on that gradients are complete."""
        with self.noting():
            conductor = self.conductor()
            assert isinstance(conductor, StepConductor)  # nothing is woven in where one is alone
            conductor.gradients_done()

    def watched(self, batches: Callable[[], Iterable[Any]]) -> Callable[[], Iterator[Any]]:
        """Return the same batches, with errors on the way remembered."""

        def iterate() -> Iterator[Any]:
            with self.noting():
                yield from batches()

        return iterate

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Have forwards pass for none of training in the block: an evaluation is traced."""
        before, self.is_resting = self.is_resting, True
        try:
            yield
        finally:
            self.is_resting = before

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Remember the first error in the block, of which TensorFlow hands on the text alone."""
        try:
            yield
        except Exception as error:
            self._failure = self._failure or error
            raise

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Have an exception that leaves the block be what ends the script, until the next one."""
        self._ended_by = None
        try:
            yield
        except BaseException as error:
            self.ended_by(error)
            raise

    def ended_by(self, error: BaseException) -> None:
        """Have the goodbye say what ended the script: others would take it for its end."""
        self._ended_by = error

    def explain(self, error: BaseException | None) -> BaseException | None:
        """Return what is behind an error of TensorFlow's: a lost worker, or an error of ours.

        A peer that dies breaks a collective with an error that names a port at best. Who it was
        is known a moment later.
        """
        if not isinstance(error, tf.errors.OpError):
            return None
        if self._failure is not None and type(self._failure).__name__ in str(error):
            return self._failure
        exchange = self._exchange
        if not isinstance(error, _OF_COLLECTIVES):
            return None
        if exchange is None:
            return lost_behind(error, self._workers)
        exchange.enter_collective()  # wherever it was: in a forward of the user's, say
        lost = exchange.verdict(within_s=_VERDICT_S)
        exchange.leave_collective()  # who hears of it may be saving: that is not to be ended
        return lost

    def say_goodbye(self) -> None:
        """Close at the end of a script that never did; if a collective broke, say who broke it."""
        error = getattr(sys, "last_value", None)
        cause = self.explain(error)  # the exchange logs what it learns
        if error is not None:
            self.ended_by(cause or error)
        self.close()

    def close(self) -> None:
        """Close the run, if it is open, for good."""
        self._closed = True
        if self._exchange is not None and self._ended_by is not None:
            self._exchange.script_failed(self._ended_by)
        if self._run is not None:
            self._run.close()

    def check_open(self) -> None:
        """Raise if the run was closed.

        Raises:
            RuntimeError: it was.
        """
        if self._closed:
            raise RuntimeError(
                "The balancer was closed. Make a new `Balancer` for a new run, and trace steps of "
                "your own anew: what `tf.function` made before knows the old one."
            )

    @property
    def _steps(self) -> StepConductor | None:
        """What measures steps, in a run of several workers that is open."""
        return self._run.conductor if isinstance(self._run, Run) else None

    @property
    def _exchange(self) -> Exchange | None:
        return self._run.exchange if isinstance(self._run, Run) else None
