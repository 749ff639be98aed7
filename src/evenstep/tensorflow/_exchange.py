"""Reports to the chief, plans back: every worker applies the same integers in the same step."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from operator import attrgetter
from time import monotonic

from .._exchange._channel import Message, StarChannel
from .._exchange._decisions import Decisions, read_plan
from .._exchange._process import end_process
from ..control import Learnt, Plan, Planner, Report
from ..events import Hook, WorkerLost
from ..exceptions import WorkerLostError

_REPORT = attrgetter(*(field.name for field in fields(Report)))
_BOOKS_S = 0.005  # the books of a step are kept this much later, in the middle of the next one


class Exchange:
    """One worker's side of the exchange: step k always decides k + 1.

    Messages go over connections of their own, and never through TensorFlow's collectives: those
    have to be issued in the same order everywhere, and name nobody when one dies.

    Args:
        rank: this process.
        hosts: host of every rank, for errors.
        channel: connections to the others.
        emit: takes every event, on rank 0.
        grace_s: seconds after the loss of a worker for which the training thread may still come
            out of TensorFlow; after that the process is ended.
        release: ends the collective that the training may be in, with a message.
        abort: ends the process with a message.
    """

    def __init__(
        self,
        rank: int,
        hosts: Sequence[str],
        channel: StarChannel,
        *,
        emit: Hook,
        grace_s: float,
        release: Callable[[str], None],
        abort: Callable[[str], None] = end_process,
    ) -> None:
        self._rank = rank
        self._hosts = tuple(hosts)
        self._channel: StarChannel | None = channel
        self._emit = emit
        self._grace_s = grace_s
        self._release = release
        self._abort = abort
        self._decisions = Decisions(len(hosts), lag=0, announcer=self, emit=emit)  # on rank 0
        self._changed = threading.Condition()
        self._plan: Plan | None = None
        self._newest = -2  # the newest step that was answered; -1 is the answer before the first
        self._first_step: int | None = None
        self._begun = -1
        self._reported = -1
        self._left: dict[int, int] = {}
        self._error_s = 0.0
        self.error: WorkerLostError | None = None

    def start(self) -> None:
        """Start listening. Before this, nothing is sent or received."""
        assert self._channel is not None
        self._channel.start(self)

    def lead(self, planner: Planner) -> None:
        """On rank 0: plan with ``planner`` and tell everybody its first plan."""
        self._decisions.planner = planner
        self.announce(planner.plan)
        self.publish(-1)

    def report(self, report: Report) -> None:
        """Send this worker's one message for a step."""
        self._reported = report.step
        if self._rank == 0:
            self._decisions.take(0, report.step, [report], early=True)
        elif self._channel is not None:
            self._channel.send(0, {"report": _REPORT(report)})

    def at(self, step: int) -> Plan:
        """Return the plan of ``step``, once it is decided: the plan point.

        Raises:
            WorkerLostError: a worker that is needed for it was lost.
        """
        if self._first_step is None:  # of this process: a resumed run counts on
            self._first_step = step
        self._begun = step
        index = -1 if step == self._first_step else step - 1
        with self._changed:
            self._changed.wait_for(lambda: self._newest >= index or self.error is not None)
        self._check_left()
        if self.error is not None:
            raise self.error
        assert self._plan is not None
        return self._plan

    def learnt(self) -> Learnt | None:
        """Return what the planner has learnt; None on ranks that have none."""
        return self._decisions.learnt()

    def verdict(self, *, within_s: float) -> WorkerLostError | None:
        """Return the loss of a worker, if one becomes known in time."""
        if self._channel is not None:  # a connection that broke is given time to be made again
            within_s += self._channel.reconnect_s
        with self._changed:
            self._changed.wait_for(lambda: self.error or self._left, timeout=within_s)
        for rank, last_step in tuple(self._left.items()):
            self._fail(rank, f"it ended its run after step {last_step}, others had not")
        return self.error

    def close(self) -> None:
        """Say goodbye and stop. May be called again."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.send_all({"bye": self._reported})
            channel.close()

    def received(self, peer: int, message: Message) -> None:
        """Take in a report (rank 0) or a plan (the others), a loss or a goodbye."""
        match message:
            case {"report": row}:
                report = Report(*row)
                self._decisions.take(peer, report.step, [report], early=True)
            case {"plan": plan}:
                self.announce(read_plan(plan))
            case {"after": index}:
                self.publish(index)
            case {"lost": rank, "problem": problem}:
                self._fail(rank, problem)
            case {"bye": last_step}:
                self._left[peer] = last_step
                self._check_left()
                with self._changed:
                    self._changed.notify_all()

    def lost(self, peer: int, problem: str) -> None:
        """Take notice of a broken or silent connection."""
        if peer not in self._left:
            self._fail(peer, problem)

    def tick(self) -> None:
        """End the process if a worker was lost and the training cannot come by to say so."""
        late = self.error is not None and monotonic() - self._error_s > self._grace_s
        if late and _is_in_tensorflow(threading.main_thread()):
            self._abort(str(self.error))

    def announce(self, plan: Plan) -> None:
        """Tell everybody of a plan, if it is new."""
        if self._plan is not None and self._plan.epoch == plan.epoch:
            return
        if self._rank == 0 and self._channel is not None:
            self._channel.send_all({"plan": asdict(plan)})
        self._plan = plan

    def publish(self, index: int) -> None:
        """Let the newest plan be the answer to step ``index``."""
        if self._rank == 0 and self._channel is not None:
            self._channel.send_all({"after": index})
        with self._changed:
            self._newest = index
            self._changed.notify_all()

    def later(self, call: Callable[[], None]) -> None:
        """Make ``call`` when nobody waits for anything."""
        if self._channel is None:
            call()
        else:
            self._channel.call_later(call, delay_s=_BOOKS_S)

    def _check_left(self) -> None:
        """Take notice if somebody is needed who has ended its run."""
        for rank, last_step in tuple(self._left.items()):
            if last_step < self._begun:
                said = f"it ended its run after step {last_step}, others are at {self._begun}"
                self._fail(rank, said)

    def _fail(self, rank: int, problem: str) -> None:
        if self.error is not None:
            return
        host, done = self._hosts[rank], self._newest
        error = lost_worker(rank, host, problem, done=done)
        if self._rank == 0 and self._channel is not None:
            # Before anything else: once the training knows, this process may end at any time,
            # and the others would take rank 0 for the one that was lost.
            self._channel.send_all({"lost": rank, "problem": problem})
            self._emit(WorkerLost(done, rank, host, problem))
        self._error_s, self.error = monotonic(), error
        logging.getLogger("evenstep").critical("%s", error)
        self._release(str(error))
        with self._changed:
            self._changed.notify_all()


def lost_worker(rank: int, host: str, problem: str, *, done: int) -> WorkerLostError:
    """Return the error of a lost worker.

    Args:
        rank: who was lost.
        host: its host.
        problem: how that was noticed.
        done: the last step complete on all ranks.
    """
    return WorkerLostError(
        rank,
        f"Rank {rank} on {host} was lost: {problem}. The last step complete on all ranks is "
        f"{done}. Start all workers anew from the last checkpoint (`BackupAndRestore` does in "
        f"`fit`); if the worker was only slow, raise `Runtime(deadline_s=...)`.",
    )


def _is_in_tensorflow(thread: threading.Thread) -> bool:
    """Tell whether the thread's innermost Python code is TensorFlow's, which may be waiting."""
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and "/tensorflow/python/" in frame.f_code.co_filename
