"""One worker's part in a run: how it is watched, opened at the first step, and ended, in words."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import tensorflow as tf
from tensorflow.python.eager import context  # not public: see `_abort_collectives`

from .._exchange._exchange import Exchange
from .._exchange._world_check import difference
from .._planner import Learnt, Plan, Planner
from .._run._machine_reader import machine_reader_of
from .._run._runtime import AbstractRuntime, RunRecord, RunSettings, lead, open_channel
from .._types import check_fields
from ._source import Row, check_same_samples
from ._strategy_workers import GONE, TENSORFLOW, ServiceRanks, StrategyWorkers, lost_behind
from ._training_steps import TrainingSteps


@dataclass(frozen=True, slots=True)
class Runtime(AbstractRuntime):
    """How a run is watched, connected and recorded; the defaults suit most runs.

    Settings that ``evenstep.torch.Runtime`` also has mean the same here.

    Args:
        deadline_s: seconds without a heartbeat after which a worker counts as lost and the others
            end with an error that names it.
        heartbeat_s: seconds between two heartbeats, positive and at most a third of
            ``deadline_s``.
        hang_s: seconds for which a worker may make the others wait in a step while its process
            lives, before it counts as lost. It has to be longer than the longest pause that one
            worker makes alone. None waits for ever.
        line_every: steps between two progress lines on standard error, from rank 0; None is
            silence.
        run_dir: folder for ``events.jsonl``, written by rank 0; None writes none.
        hooks: called with every event on rank 0, each in a thread of its own.
        address: host name or address of rank 0 that every other rank can reach, or one of its
            network interfaces; None takes the address that the strategy itself uses for rank 0.
        ports: the TCP port at which rank 0 listens for the other ranks, or a ``range`` of which it
            takes the first free port; None is any free port.
        meeting_s: seconds within which all workers have to reach their first step.

    Raises:
        ValueError: a number is out of range.
    """

    meeting_s: float = 300.0

    def __post_init__(self) -> None:
        self.check_watch()
        remedy = "Give as long as the slowest worker takes to its first step."
        check_fields(self, meeting_s=("positive", remedy))


_VERDICT_S = 2.0
_REMEDY = "Run the same script everywhere, and load the same state on every worker."
Start = tuple[RunSettings, int, dict[str, str]]
"""What a run is opened with, the number of its first step, and what all workers have alike."""


@final
class KerasSession:
    """Opens the run at its first step, and remembers errors that TensorFlow keeps the text of."""

    def __init__(
        self,
        workers: StrategyWorkers,
        steps: TrainingSteps,
        runtime: Runtime,
        start: Callable[[], Start],
    ) -> None:
        self.steps = steps
        self._workers = workers
        self._runtime = runtime
        self._start = start
        self._ranks: ServiceRanks | None = None
        self._record: RunRecord | None = None
        self._exchange: Exchange | None = None
        self._failure: Exception | None = None
        self._ended_by: BaseException | None = None
        self._pid = os.getpid()
        self._closed = False
        self.is_open = False

    @property
    def learnt(self) -> Learnt | None:
        """What the planner has learnt, on rank 0."""
        return None if self._exchange is None else self._exchange.decisions.learnt()

    def open(self) -> TrainingSteps:
        """Return the steps; the first call opens the run, on all workers together.

        Raises:
            RuntimeError: it was closed.
            ValueError: workers have other settings than each other.
            ConnectionError: they did not come together in time.
            WorkerLostError: one of them is gone.
        """
        self.check_open()
        if not self.is_open:
            settings, self.steps.num_steps, alike = self._start()
            if self._workers.world_size > 1:
                self._connect(settings, alike)
            else:
                job = settings.job
                tail = (job.tail_size,) if job.tail_size else None
                self.steps.plan = Plan(0, 0, (job.global_batch_size,), tail=tail)
            self.is_open = True
        return self.steps

    def compare(self, rows: list[Row]) -> None:
        """Compare what workers have read in an epoch. Collective.

        Raises:
            ValueError: some have read other samples.
            WorkerLostError: a worker was lost meanwhile.
        """
        if self._ranks is not None:
            check_same_samples(self._ranks.collect(rows))

    def gradients_done(self) -> None:
        """Pass on that gradients are complete, and remember what is wrong with them."""
        with self.noting():
            self.check_open()
            self.steps.gradients_done()

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
            self._ended_by = error
            raise

    def ended_by(self, error: BaseException | None) -> BaseException | None:
        """Have the goodbye say what ended the script; return what is behind that error, if known.

        Others would take it for the end of training.
        """
        cause = self.explain(error)
        self._ended_by = cause or error or self._ended_by
        return cause

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
        if not isinstance(error, (*GONE, tf.errors.DeadlineExceededError)):
            return None
        if exchange is None:
            return lost_behind(error, self._workers)
        exchange.lost_ranks.enter_collective()  # wherever it was: in a forward of the user's, say
        lost = exchange.lost_ranks.verdict(within_s=_VERDICT_S)
        # A worker that learns of it may be saving: that is not to be ended.
        exchange.lost_ranks.leave_collective()
        return lost

    def check_open(self) -> None:
        """Raise if the run was closed.

        Raises:
            RuntimeError: it was.
        """
        if self._closed:
            raise RuntimeError(
                "The balancer was closed. Make a new `Balancer` for a new run, and trace steps of "
                "your own again: functions that `tf.function` traced before use the old one."
            )

    def close(self) -> None:
        """Close the run, if it is open, for good. Not in a forked child, which is no worker."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        atexit.unregister(self._say_goodbye)
        if self._exchange is None or self._record is None:
            return
        if self._ended_by is not None:
            self._exchange.lost_ranks.script_failed(self._ended_by)
        if not self._exchange.lost_ranks.is_broken:
            self.steps.close()
        self._exchange.close()
        self._record.end(self.steps.num_done if self._workers.rank == 0 else None)

    def _connect(self, settings: RunSettings, alike: dict[str, str]) -> None:
        workers, runtime, steps = self._workers, self._runtime, self.steps
        # On every rank, though rank 0 alone uses it: what it refuses, all of them should learn.
        planner = Planner(settings.policy, settings.job)
        atexit.register(self._say_goodbye)
        ranks = ServiceRanks(workers, wait_s=runtime.meeting_s, deadline_s=runtime.deadline_s)
        different = difference(ranks.collect({"": alike}), dict.fromkeys(alike, _REMEDY))
        if different is not None:
            raise ValueError(different)
        record = RunRecord(runtime, speaks=workers.rank == 0)
        exchange = Exchange(
            workers.rank,
            workers.hosts,
            open_channel(ranks, runtime, workers.hosts[:1], timeout_s=runtime.meeting_s),
            framework=TENSORFLOW,
            emit=record.emit,
            heartbeat_s=runtime.heartbeat_s,
            hang_s=runtime.hang_s,
            grace_s=3 * runtime.heartbeat_s,
        )
        exchange.lost_ranks.on_loss = _abort_collectives
        # Who is waited for while epochs are compared may be lost, or have ended its run.
        ranks.look = lambda: exchange.need_all(steps.num_steps)
        self._ranks, self._record, self._exchange = ranks, record, exchange
        steps.begin(exchange, machine_reader_of(settings.policy))
        record.start()
        exchange.start()
        if workers.rank == 0:
            hosts = workers.hosts
            devices = ["tensorflow"] * len(hosts)
            lead(
                exchange,
                planner,
                settings,
                record.emit,
                hosts=hosts,
                devices=devices,
                workers=hosts,
            )

    def _say_goodbye(self) -> None:
        """Close at the end of a script that never did; if a collective broke, say who broke it."""
        self.ended_by(getattr(sys, "last_value", None))  # the exchange logs what it learns
        self.close()


def _abort_collectives(error: BaseException) -> None:
    """End the collective that the training may be stuck in, with ``error`` as its message."""
    context.context().abort_collective_ops(tf.errors.UNAVAILABLE, str(error))
