"""Rank 0's half of the exchange: what all ranks report, what is decided, where time went."""

from __future__ import annotations

import threading
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import final

from .._diagnosis import (
    Diagnoser,
    HostClues,
    StepAccounts,
    StepClues,
    accounted,
)
from .._planner import AbstractPlanner, EqualSizes, Learnt, Plan, Report
from ..events import BalancingStopped, Event, Hook, PolicySlow, WaitingDiagnosed, WorkerUnhelpful
from ._answers import Answers
from ._internal import ALL_EQUAL, fault_in_words, log_fault
from ._message_kinds import Message, PlanRequest, StepReports, TimesReport

_LOOK_S = 10.0  # from one diagnosis to the next
_CALM_S = 30.0  # from one that is reported to the next
_FEWEST = 10  # steps, for a diagnosis at the end
_MOST_CLUES = 256  # steps with some whose times are not complete

_CONTINUES = (
    "Training and balancing continue; who waits for whom is not reported any more in this run."
)

# Everybody waits for a decision. A policy that takes longer is asked so rarely that it costs a
# twentieth of the time; but never less often than once a minute, as speeds change.
_SLOW_S = 0.5
_SLOW_IN_A_ROW = 2  # one may be a pause of this process, and no fault of the policy
_REST_TIMES = 19
_LONGEST_REST_S = 60.0

_LOOK_EVERY = 50  # steps between two looks for a worker that costs more than it brings


@final
class TimeBooks:
    """Reports where the time went, once there is enough of it, and changes in who waits for whom.

    At the end it reports who waited for whom in the whole run. A diagnosis that raises is logged,
    and there is no other one in the run.

    Args:
        world_size: number of workers.
        emit: takes every event.
        clock: monotonic seconds.
    """

    def __init__(self, world_size: int, *, emit: Hook, clock: Callable[[], float]) -> None:
        self._emit = emit
        self._clock = clock
        self._lock = threading.Lock()  # reports arrive while events are emitted
        self._reporting = threading.Lock()
        self._accounts = StepAccounts(world_size)
        self._diagnoser = Diagnoser(world_size, parts_stay=False) if world_size > 1 else None
        self._ranks = range(world_size)
        self._clues: dict[int, dict[int, StepClues]] = {}  # by step and rank, where there are some
        self._hosts: list[tuple[int, HostClues]] = []
        self._look_s = clock() + _LOOK_S
        self._calm_until_s = 0.0
        self._said: set[tuple[str, int]] = set()

    def add(self, rank: int, times: TimesReport) -> bool:
        """Take in one rank's times of a step; return whether there is enough to report."""
        with self._lock:
            if self._diagnoser is not None and times.host is not None:
                self._hosts.append((rank, times.host))
            if self._diagnoser is not None and times.clues is not None:
                self._clues.setdefault(times.step, {})[rank] = times.clues
                if len(self._clues) > _MOST_CLUES:  # where some rank reports no times at all
                    del self._clues[next(iter(self._clues))]
            return self._accounts.add(rank, times.step, times.spent_us)

    def report(self) -> None:
        """Report the steps that all ranks are through with."""
        self._report(self._changed)

    def end(self) -> None:
        """Report all that is left, and the run as a whole; once."""
        self._report(self._of_whole_run)
        self._diagnoser = None

    def _report(self, diagnose: Callable[[Diagnoser], WaitingDiagnosed | None]) -> None:
        """Report the account of the complete steps, and the diagnosis with them, if it is due."""
        found = None
        with self._reporting:
            with self._lock:
                steps = self._accounts.take()
                hosts, self._hosts = self._hosts, []
                clues = [self._clues_of(step) for step, _ in steps]
            if self._diagnoser is not None:
                try:
                    for rank, host in hosts:
                        self._diagnoser.add_host(rank, host)
                    for (step, spent_us), noticed in zip(steps, clues, strict=True):
                        self._diagnoser.add(step, spent_us, noticed)
                    found = diagnose(self._diagnoser)
                except Exception as error:
                    log_fault(steps[-1][0] if steps else None, error, _CONTINUES)
                    self._diagnoser = None
        if steps:
            self._emit(accounted(*zip(*steps, strict=True)))
        if found is not None:
            self._emit(found)

    def _clues_of(self, step: int) -> list[StepClues] | None:
        """Return what all ranks noticed in a step that is complete; None if that is nothing."""
        found = self._clues.pop(step, None)
        while self._clues and (oldest := next(iter(self._clues))) < step:
            del self._clues[oldest]  # of a step for which some rank reported no times
        none = StepClues()
        return None if found is None else [found.get(rank, none) for rank in self._ranks]

    def _changed(self, diagnoser: Diagnoser) -> WaitingDiagnosed | None:
        """Return a diagnosis that names other causes than the last one reported."""
        now_s = self._clock()
        if now_s < self._look_s:
            return None
        self._look_s = now_s + _LOOK_S
        found = diagnoser.diagnose()
        names = {*zip(found.causes, found.ranks, strict=True)}
        if names == self._said or now_s < self._calm_until_s:
            return None
        self._said = names
        self._calm_until_s = now_s + _CALM_S
        return found

    def _of_whole_run(self, diagnoser: Diagnoser) -> WaitingDiagnosed | None:
        found = diagnoser.diagnose(whole_run=True)
        return found if found.num_steps >= _FEWEST else None


class Decisions:
    """Decides as soon as the last report of a step is there that is due.

    It does so on the thread that brought the report, which is the channel's.

    Where anything in that fails but a user's policy, all ranks continue with equal sizes, from
    the same step on and for the rest of the run.

    Args:
        world_size: number of workers.
        lag: steps by which a plan trails its measurement.
        answers: sends answers and plans to all ranks.
        emit: takes every event.
        clock: monotonic seconds.

    Attributes:
        planner: decides; set before the first report, and replaced once something in it fails.
        holds: whether a plan may hold for several steps. False where extensions have plans of their
            own, which would be late, and reports to be compared.
    """

    kinds = (StepReports, PlanRequest, TimesReport)

    def __init__(
        self,
        world_size: int,
        *,
        lag: int,
        answers: Answers,
        emit: Hook,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.planner: AbstractPlanner | None = None
        self._world_size = world_size
        self._lag = lag
        self._answers = answers
        self._emit = emit
        self._clock = clock
        self._lock = threading.RLock()  # books are kept under it too, at once in a single process
        self._arrived: defaultdict[int, set[int]] = defaultdict(set)
        self._measured: defaultdict[int, dict[int, Report]] = defaultdict(dict)
        self._times = TimeBooks(world_size, emit=emit, clock=clock)
        self._first: Plan | None = None
        self._in_force: dict[int, Plan] = {}  # by step, from the first that was published on
        self._unkept: deque[tuple[list[Report], Plan, tuple[Event, ...]]] = deque()
        self._keeps_soon = False
        self._burden: int | None = None  # who was one at the last look
        self._warned: set[int] = set()
        self._rest_until_s = 0.0
        self._num_slow = 0  # in a row
        self._answered = -1  # the newest step that was answered
        self._due = 0  # the step after which the next plan is decided
        self.holds = True

    def received(self, peer: int, message: Message) -> None:
        """Take in a rank's reports of a step, or that it asks for a plan ahead."""
        match message:
            case StepReports(step, reports):
                self.take(peer, step, reports)
            case PlanRequest(index):
                self.answer(index)
            case TimesReport():
                if self._times.add(peer, message):
                    self._answers.later(self._times.report)

    def end(self) -> None:
        """Report the steps that are left, where the time went, and who waited for whom."""
        with self._lock:
            if self.planner is not None:
                self._show(self._next_step(self._answered))
        self._keep_all_books()
        self._times.end()

    def take(self, rank: int, step: int, reports: Sequence[Report]) -> None:
        """Take in a rank's message for ``step``, and decide if it is the last."""
        with self._lock:
            for report in reports:
                self._measured[report.step][rank] = report
                if report.fault:
                    self._cannot_measure(rank, step, report.fault)
            self._arrived[step].add(rank)
            if len(self._arrived[step]) == self._world_size:
                del self._arrived[step]
                if step >= self._due:
                    self._show(self._next_step(step))
                    self._answer_from(step)
                self._answers.completed(step)

    def answer(self, index: int) -> None:
        """Answer to step ``index`` with the newest plan, before all ranks have reported it."""
        with self._lock:
            if index > self._answered:
                self._publish(self._first_unanswered(index), index, done=self._answers.newest_done)

    def _publish(self, first: int, index: int, *, done: int) -> None:
        """Answer to the steps from ``first`` to ``index`` at least, and until the next is due.

        All have done step ``done``.
        """
        assert self.planner is not None
        for answered in range(first, max(index, self._due - 1) + 1):
            self._in_force[answered + 1 + self._lag] = self.planner.plan
        for answered in range(first, index):  # one that no rank used, and none asked for by itself
            self._answers.publish(answered, due=min(self._due, answered), done=done)
        self._answers.publish(index, due=self._due, done=done)
        self._answered = max(index, self._due - 1)

    def _first_unanswered(self, index: int) -> int:
        """Return the first step up to ``index`` that is not answered; ranks need no older one."""
        return self._answered + 1 if self._answered >= 0 else max(index - self._lag, 0)

    def learnt(self) -> Learnt | None:
        """Return what the planner has learnt; None before there is one."""
        with self._lock:
            return None if self.planner is None else self.planner.learnt()

    @property
    def newest(self) -> int:
        """The newest step that some ranks have reported and some have not; -1 if there is none."""
        with self._lock:
            return max(self._arrived, default=-1)

    def waits_for(self, rank: int) -> int | None:
        """Return a step that some ranks have reported and ``rank`` has not; None if none."""
        with self._lock:
            found = (step for step, known in self._arrived.items() if rank not in known)
            return min(found, default=None)

    def _show(self, next_step: int) -> None:
        """Show the planner what is complete.

        Args:
            next_step: the first step that can use what is decided.
        """
        assert self.planner is not None
        first = self._first = self._first or self.planner.plan
        complete = [
            index for index, known in self._measured.items() if len(known) == self._world_size
        ]
        for index in sorted(complete):
            known = self._measured.pop(index)
            reports = [known[rank] for rank in range(self._world_size)]
            ran = self._in_force.pop(index, first)
            events = self._catch_up(index, next_step)
            observe = partial(self.planner.observe, reports, next_step=next_step)
            events += self._ask(observe, index)
            self._unkept.append((reports, ran, events))

    def _answer_from(self, step: int) -> None:
        """Answer to ``step``, which all ranks have reported, and say when the next plan is due.

        Where ranks have asked ahead, they have an answer already. The books are kept later.
        """
        assert self.planner is not None
        for books_of in (self._measured, self._in_force):
            for old in [old for old in books_of if old < step - 8]:
                del books_of[old]  # a rank had no measurement of it, and never will
        index = max(step, self._answered + 1)
        self._due = step + (self.planner.hold if self.holds else 1)
        if index < self._due:
            self._publish(self._first_unanswered(index), index, done=step)
        if self._unkept and not self._keeps_soon:
            self._keeps_soon = True
            self._answers.later(self._keep_all_books)

    def _next_step(self, step: int) -> int:
        """Return the first step that can use what is decided after ``step``, or later."""
        # What ranks asked for ahead is in force already. A step that no rank used is still free.
        after = self._answered + 1 if self._answered >= 0 else step
        return after + 1 + self._lag

    def _catch_up(self, step: int, next_step: int) -> tuple[Event, ...]:
        """Have the planner make up for a step that it put off, before it is shown another.

        What it plans then holds from ``next_step``: others may have been answered meanwhile.
        """
        if self.planner is None or not self.planner.is_behind:
            return ()
        return self._ask(partial(self.planner.catch_up, next_step=next_step), step)

    def _ask(self, planning: Callable[..., tuple[Event, ...]], step: int) -> tuple[Event, ...]:
        """Have the planner decide; announce its plan. The policy may rest if it takes too long."""
        began_s = self._clock()
        ask = began_s >= self._rest_until_s
        try:
            events = planning(ask=ask)
        except Exception as error:
            events = self._give_up(step, error)
        ended_s = self._clock()
        took_s = ended_s - began_s
        self._announce()
        if ask:
            self._num_slow = self._num_slow + 1 if took_s > _SLOW_S else 0
        if not ask or self._num_slow < _SLOW_IN_A_ROW:
            return events
        rest_s = min(_REST_TIMES * took_s, _LONGEST_REST_S)
        self._rest_until_s = ended_s + rest_s
        return (*events, PolicySlow(step, took_s, rest_s))

    def _give_up(self, step: int, error: Exception) -> tuple[Event, ...]:
        """Continue with equal sizes for good: what failed is no user's, and may be half changed."""
        if self.planner is None or isinstance(self.planner, EqualSizes):
            return ()
        log_fault(step, error, ALL_EQUAL)
        self.planner = EqualSizes(self.planner, self._next_step(step))
        trace = "".join(traceback.format_exception(error))
        return (BalancingStopped(step, 0, fault_in_words(error), trace),)

    def _cannot_measure(self, rank: int, step: int, fault: str) -> None:
        """Continue with equal sizes for good: a rank can no longer measure what it takes."""
        if self.planner is not None and not isinstance(self.planner, EqualSizes):
            self.planner = EqualSizes(self.planner, self._next_step(step))
            self._announce()
            self._answers.later(partial(self._emit, BalancingStopped(step, rank, fault, "")))

    def _announce(self) -> None:
        if self.planner is not None:
            self._answers.announce(self.planner.plan)

    def _keep_all_books(self) -> None:
        """Report all steps that were decided on: of short ones there are several at once."""
        self._keeps_soon = False
        while self._unkept:
            self._keep_books(*self._unkept.popleft())

    def _keep_books(self, reports: list[Report], ran: Plan, events: tuple[Event, ...]) -> None:
        """Report what a step cost and what was decided after it."""
        step = reports[0].step
        with self._lock:
            events += self._catch_up(step, self._next_step(step))
        try:
            with self._lock:
                assert self.planner is not None
                measured = self.planner.account(reports, ran)
                warned = self._look_for_burden(step)
            for event in (*((measured,) if measured else ()), *events, *warned):
                self._emit(event)
        except Exception as error:
            with self._lock:
                stopped = self._give_up(step, error)
                self._announce()
            with suppress(Exception):  # it may be what failed: the log has it
                for event in stopped:
                    self._emit(event)

    def _look_for_burden(self, step: int) -> tuple[WorkerUnhelpful, ...]:
        """Return the worker that costs more than it brings, once, if two looks in a row say so."""
        if step % _LOOK_EVERY or self.planner is None:
            return ()
        found = self.planner.burden(step)
        rank, before = None if found is None else found.rank, self._burden
        self._burden = rank
        if found is None or rank != before or rank in self._warned:
            return ()
        self._warned.add(found.rank)
        return (found,)
