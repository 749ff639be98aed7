"""Reports to rank 0, plans back: every rank applies the same integers in the same step."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from functools import partial
from operator import attrgetter
from time import monotonic
from typing import Any

from ..control import Plan, Planner, Report
from ..events import Event, Hook, PolicyFailed, WorkerLost
from ..exceptions import WorkerLostError
from ._channel import Message, StarChannel
from ._stuck import end_process, is_in_collective

_REPORT = attrgetter(*(field.name for field in fields(Report)))

# The books of a step are kept this much later, in the middle of the next one: at once, they
# would take Python's lock from the main thread on its way through the optimizer.
_BOOKS_S = 0.005


class Exchange:
    """One rank's side of the exchange.

    Every rank sends one message for every step, with whatever measurements are complete. When all
    have arrived, rank 0 decides and answers with the plan. The plan of step ``s`` is the one
    decided after the messages of step ``s - 1 - lag``: with lag 0 (CPU) step k decides k + 1; with
    lag 1 (CUDA) nobody waits for a device, and step k usually decides k + 2.

    Messages and decisions run on the channel's thread, or on the caller's where its own report is
    the last one; both while the all-reduce and the optimizer of the same step keep the caller
    busy, so that the plan point finds the answer there.

    Args:
        rank: this process.
        hosts: host name of every rank, for errors.
        channel: connections to the others; None with one process.
        lag: steps by which a plan trails its measurement, 0 or 1.
        emit: takes every event, on rank 0.
        grace_s: seconds after the loss of a worker for which the main thread may still come out of
            a collective. After that the process is ended: a collective with a lost peer blocks
            for half an hour, and gloo's cannot be interrupted.
        abort: ends the process with a message.
        is_stuck: tells whether a thread sits in a collective of torch's, by its number.
    """

    def __init__(
        self,
        rank: int,
        hosts: Sequence[str],
        channel: StarChannel | None,
        *,
        lag: int = 0,
        emit: Hook,
        grace_s: float = 3.0,
        abort: Callable[[str], None] | None = None,
        is_stuck: Callable[[int], bool] | None = None,
    ) -> None:
        self._rank = rank
        self._hosts = tuple(hosts)
        self._channel = channel
        self._lag = lag
        self._emit = emit
        self._grace_s = grace_s
        self._abort = abort or end_process
        self._is_stuck = is_stuck or is_in_collective
        self._planner: Planner | None = None
        self._plan: Plan | None = None
        self._plans: dict[int, Plan] = {}  # by the step after which each was decided
        self._newest = -2
        self.slowest_s: float | None = None  # compute time of the slowest, in the newest step
        self._changed = threading.Condition()  # `_newest` grew, or a worker was lost
        self._deciding = threading.Lock()
        self._arrived: defaultdict[int, set[int]] = defaultdict(set)
        self._measured: defaultdict[int, dict[int, Report]] = defaultdict(dict)
        self._left: dict[int, int] = {}
        self._listeners: list[Callable[[Plan], None]] = []
        self._error: WorkerLostError | None = None
        self._error_s = 0.0
        self._collective_s: float | None = None  # since when the training thread is in one
        self._thread_id = 0
        self._first_step: int | None = None
        self._last_step = -1

    def start(self) -> None:
        """Start listening. Before this, nothing is sent or received."""
        if self._channel is not None:
            self._channel.start(self)

    def lead(self, planner: Planner) -> None:
        """On rank 0: plan with ``planner`` and tell everybody its first plan."""
        self._planner = planner
        self._announce(planner.plan)
        self._publish(-1)

    def subscribe(self, listener: Callable[[Plan], None]) -> None:
        """Have ``listener`` called with every new plan, from whichever thread learns of it."""
        self._listeners.append(listener)

    def report(self, step: int, reports: Sequence[Report]) -> None:
        """Send this rank's one message for ``step``."""
        self._last_step = step
        if self._rank != 0 and self._channel is not None:
            rows = [_REPORT(report) for report in reports]
            self._channel.send(0, {"step": step, "reports": rows})
            self._check_left()
        else:
            self._take(0, step, reports)

    def at(self, step: int) -> Plan:
        """Return the plan of ``step``, once it is decided: the plan point.

        Raises:
            WorkerLostError: a worker that is needed for it was lost.
        """
        self._collective_s = None
        if self._first_step is None:  # of this process: a resumed run counts on
            self._first_step = step
        index = step - 1 - self._lag
        if index < self._first_step:
            index = -1
        self._await(index, limit_s=None)
        with self._changed:
            for old in [key for key in self._plans if key < index]:
                del self._plans[old]
            return self._plans[index]

    def settle(self, step: int, *, limit_s: float) -> bool:
        """Wait until all ranks have reported ``step`` and the answer is here, at most ``limit_s``.

        Called when this rank's own backward is done and a collective would make it wait for the
        others anyway: here a lost worker raises an error with its name, there it would hang.

        Returns:
            Whether the answer came in time.

        Raises:
            WorkerLostError: a worker was lost.
        """
        return self._await(step, limit_s=limit_s)

    def check(self) -> None:
        """Raise if a worker was lost.

        Raises:
            WorkerLostError: a worker was lost.
        """
        if self._error is not None:
            raise self._error

    def verdict(self, *, within_s: float) -> WorkerLostError | None:
        """Return the loss of a worker, if one becomes known in time.

        For somebody whose collective broke: a rank that ended its run is to blame for that too.
        None at once if no collective was under way.
        """
        if self._collective_s is None:
            return None
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._left, timeout=within_s)
        for rank, last_step in tuple(self._left.items()):
            self._fail(rank, f"it ended its run after step {last_step}, others had not")
        return self._error

    def enter_collective(self) -> None:
        """Note that the calling thread goes where it cannot hear of a loss."""
        self._thread_id = threading.get_ident()
        self._collective_s = monotonic()

    def leave_collective(self) -> None:
        """Note that it is back."""
        self._collective_s = None

    def close(self) -> None:
        """Say goodbye and stop. May be called again."""
        self._collective_s = None
        if self._channel is not None:
            self._channel.send_all({"bye": self._last_step})
            self._channel.close()
            self._channel = None

    def received(self, peer: int, message: Message) -> None:
        """Take in a report (rank 0) or a plan (the others), a loss or a goodbye."""
        match message:
            case {"step": step, "reports": rows}:
                self._take(peer, step, [Report(*row) for row in rows])
            case {"plan": plan}:
                self._announce(_read_plan(plan))
            case {"after": index, "slowest_s": slowest_s}:
                self.slowest_s = slowest_s
                self._publish(index)
            case {"lost": rank, "problem": problem}:
                self._fail(rank, problem)
            case {"bye": last_step}:
                with self._changed:
                    self._left[peer] = last_step
                    self._changed.notify_all()
                self._check_left()

    def lost(self, peer: int, problem: str) -> None:
        """Take notice of a broken or silent connection."""
        if peer in self._left:
            return
        self._fail(peer, problem)

    def tick(self) -> None:
        """End the process if a worker was lost and the main thread cannot come by to say so."""
        since_s = self._collective_s
        if self._error is None or since_s is None:
            return
        late = monotonic() - max(self._error_s, since_s) > self._grace_s
        if late and self._is_stuck(self._thread_id):
            self._abort(str(self._error))

    def _take(self, rank: int, step: int, reports: Sequence[Report]) -> None:
        with self._deciding:
            for report in reports:
                self._measured[report.step][rank] = report
            self._arrived[step].add(rank)
            if len(self._arrived[step]) == len(self._hosts):
                del self._arrived[step]
                self._decide(step)
        self._check_left()

    def _decide(self, step: int) -> None:
        """Show the planner what is complete and publish what it says; then keep the books."""
        planner = self._planner
        assert planner is not None
        books: list[Callable[[], None]] = []
        complete = [
            index for index, known in self._measured.items() if len(known) == len(self._hosts)
        ]
        for index in sorted(complete):
            known = self._measured.pop(index)
            reports = [known[rank] for rank in range(len(self._hosts))]
            self.slowest_s = max(report.compute_s for report in reports)
            before = planner.plan
            try:
                events = planner.observe(reports, next_step=step + 1 + self._lag).events
            except Exception as error:  # training that could go on goes on, with the last plan
                events = (PolicyFailed(index, f"{type(error).__name__}: {error}"),)
            self._announce(planner.plan)
            books.append(partial(self._account, planner, reports, before, events))
        for index in [index for index in self._measured if index < step - 8]:
            del self._measured[index]  # a rank had no measurement of it, and never will
        self._publish(step)
        for book in books:
            if self._channel is None:
                book()
            else:
                self._channel.call_later(book, delay_s=_BOOKS_S)

    def _account(
        self, planner: Planner, reports: list[Report], plan: Plan, events: tuple[Event, ...]
    ) -> None:
        measured = planner.account(reports, plan)
        for event in (measured, *events) if measured else events:
            self._emit(event)

    def _announce(self, plan: Plan) -> None:
        """Tell everybody of a plan, if it is new. None may be left out: ranks replay them all."""
        if self._plan is not None and self._plan.epoch == plan.epoch:
            return
        if self._rank == 0 and self._channel is not None:
            self._channel.send_all({"plan": asdict(plan)})
        self._plan = plan
        for listener in tuple(self._listeners):
            listener(plan)

    def _publish(self, index: int) -> None:
        """Let the newest plan be the answer to step ``index``."""
        assert self._plan is not None
        if self._rank == 0 and self._channel is not None:
            self._channel.send_all({"after": index, "slowest_s": self.slowest_s})
        with self._changed:
            self._plans[index] = self._plan
            self._newest = index
            self._changed.notify_all()

    def _await(self, index: int, *, limit_s: float | None) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._newest >= index or self._error, timeout=limit_s)
            if self._newest < index:
                self.check()
            return self._newest >= index

    def _check_left(self) -> None:
        """Fail if somebody is needed who has ended its run."""
        with self._deciding:
            ahead = max(self._arrived, default=-1)
        if self._rank != 0:
            ahead = self._last_step if self._newest < self._last_step else -1
        for rank, last_step in tuple(self._left.items()):
            if ahead > last_step:
                self._fail(rank, f"it ended its run after step {last_step}, others are at {ahead}")

    def _fail(self, rank: int, problem: str) -> None:
        if self._error is not None:
            return
        host = self._hosts[rank]
        done = self._newest
        error = WorkerLostError(
            rank,
            f"Rank {rank} on {host} was lost: {problem}. The last step complete on all ranks is "
            f"{done}. Restart the run from its last checkpoint (torchrun does with "
            f"`--max-restarts`); if the worker was only slow to answer, raise "
            f"`Runtime(deadline_s=...)`.",
        )
        if self._rank == 0 and self._channel is not None:
            # Before anything else: once the main thread knows, this process may end at any time,
            # and the others would take rank 0 for the one that was lost.
            self._channel.send_all({"lost": rank, "problem": problem})
            self._emit(WorkerLost(done, rank, host, problem))
        self._error_s = monotonic()
        self._error = error
        with self._changed:
            self._changed.notify_all()
        logging.getLogger("evenstep").critical("%s", error)


def _read_plan(written: dict[str, Any]) -> Plan:
    """Return the plan that was sent: JSON knows lists, a plan holds tuples."""
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in written.items()
    }
    return Plan(**values)
