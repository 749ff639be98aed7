"""What fails in a policy or in evenstep itself costs the balancing, or ends the run by name."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, final

import numpy as np
import pytest

from evenstep import Decision
from evenstep._exchange._decisions import Decisions
from evenstep._exchange._message_kinds import TimesReport
from evenstep._planner import Job, Planner, Report
from evenstep.events import (
    BalancingStopped,
    MeasurementRejected,
    PolicyFailed,
    PolicySlow,
    Rebalanced,
    StepMeasured,
    WorkerUnhelpful,
)
from evenstep.exceptions import WorkerLostError
from evenstep.policies import AbstractPolicy, Auto

from .exchanges import Shifting, pairs, report, reports_of
from .test_exchange import play


class Ranks:
    """Takes in what is announced to the ranks, and the events."""

    def __init__(self):
        self.plans, self.answered, self.events = [], [], []
        self.newest_done = -1

    def announce(self, plan):
        if not self.plans or self.plans[-1].epoch != plan.epoch:
            self.plans.append(plan)

    def publish(self, index, *, due, done):
        self.answered += range(index, max(index, due - 1) + 1)

    def completed(self, step): ...

    def later(self, call):
        call()


@final
@dataclass(frozen=True)
class Scripted(AbstractPolicy[Any]):
    """Gives whatever its script says, one entry an update: a value, or a function to call."""

    script: tuple[Any, ...]
    name = "scripted"

    def init(self, cluster):
        return Decision(np.array([8, 8]), 0, "start")

    def update(self, cluster, timings, state):
        given = self.script[min(self.calls(timings), len(self.script) - 1)]
        return given(cluster, timings, state) if callable(given) else given

    def calls(self, timings):
        return round(float(timings.data_s[0]))  # the tests number their steps there


def good(*sizes, state=0, reason="fine"):
    return Decision(np.array(sizes), state, reason)


def run(policy, num_steps, *, clock=None, change=None):
    """Run some steps of two ranks; return what the ranks and rank 0's sinks got."""
    ranks = Ranks()
    settings = {} if clock is None else {"clock": clock}
    decisions = Decisions(2, lag=0, answers=ranks, emit=ranks.events.append, **settings)
    decisions.planner = Planner(policy, Job(2, 16))
    ranks.announce(decisions.planner.plan)
    for step in range(num_steps):
        sizes = ranks.plans[-1].batch_size
        for rank in (0, 1):
            report = Report(step, sizes[rank], 16, compute_s=0.1, data_s=max(step - 1.0, 0.0))
            report = change(report, rank) if change else report
            decisions.take(rank, step, [report])
    assert ranks.answered == list(range(num_steps)), "training did not go on"
    return ranks


def failures(ranks):
    return [event for event in ranks.events if isinstance(event, PolicyFailed)]


def explode(cluster, timings, state):
    raise RuntimeError("a mistake")


def scribble(cluster, timings, state):
    cluster.min_batch_size[:] = 100
    return good(8, 8)


BROKEN = {
    "raises": explode,
    "wrong sum": good(8, 9),
    "negative": good(-1, 17),
    "fractions": Decision(np.array([7.5, 8.5]), 0, "halves"),
    "NaN": Decision(np.array([np.nan, 8.0]), 0, "no number"),
    "truth values": Decision(np.array([True, False]), 0, "yes"),
    "wrong shape": good(16),
    "a list": Decision([8, 8], 0, "no array"),
    "None": None,
    "no decision": (8, 8),
    "writes into its inputs": scribble,
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_the_last_good_plan_stays(broken):
    """Before it, after it, and the next good decision counts again."""
    ranks = run(Scripted((good(7, 9), broken, broken, good(6, 10))), 6)

    assert [plan.batch_size for plan in ranks.plans] == [(8, 8), (7, 9), (6, 10)]
    assert [failure.step for failure in failures(ranks)] == [2, 3]


def test_a_state_of_nan_breaks_only_what_follows_from_it():
    """Sizes made of it are refused, whatever they are."""

    def poisoned(cluster, timings, state):
        sizes = np.array([7, 9]) + state
        return Decision(sizes if np.isnan(state) else sizes.astype(int), np.nan, "poisoned")

    ranks = run(Scripted((poisoned,)), 5)

    assert [plan.batch_size for plan in ranks.plans] == [(8, 8), (7, 9)]
    assert len(failures(ranks)) == 3


def test_changed_timings_reach_nobody_else():
    """What a policy writes into its timings is not what is told of the step."""

    def scribble_times(cluster, timings, state):
        timings.compute_s[:] = 1e9
        return good(7, 9)

    ranks = run(Scripted((scribble_times,)), 3)
    told = [event.compute_s for event in ranks.events if hasattr(event, "compute_s")]

    assert told == [(0.1, 0.1)] * 3


def test_a_reason_may_be_anything():
    """It travels as text."""
    ranks = run(Scripted((good(7, 9, reason=object()),)), 3)

    assert isinstance(ranks.plans[-1].reason, str)
    assert failures(ranks) == []


def test_a_policy_that_takes_seconds_is_asked_rarely():
    """From the second time on it costs a twentieth of the time, and is told of."""
    now_s, asked_s = [0.0], []

    def slow(cluster, timings, state):
        asked_s.append(now_s[0])
        now_s[0] += 2.0
        return good(7 + len(asked_s) % 2, 9 - len(asked_s) % 2)

    def clock():
        now_s[0] += 0.4  # so a step takes 0.8 s
        return now_s[0]

    ranks = run(Scripted((slow,)), 250, clock=clock)

    rests = [event for event in ranks.events if isinstance(event, PolicySlow)]
    assert asked_s[1] - asked_s[0] < 5
    assert all(later - earlier >= 40 for earlier, later in pairwise(asked_s[1:]))
    assert len(asked_s) >= 4
    assert rests[0].decide_s == pytest.approx(2.4)
    assert rests[0].rest_s == pytest.approx(19 * 2.4)
    assert failures(ranks) == []
    assert len([event for event in ranks.events if isinstance(event, Rebalanced)]) >= 3


def test_one_pause_in_a_decision_is_no_slow_policy():
    """Rank 0 may have been stopped for half a minute; the policy is asked at the next step."""
    now_s, asked_s = [0.0], []

    def paused_once(cluster, timings, state):
        asked_s.append(now_s[0])
        now_s[0] += 30.0 if len(asked_s) == 2 else 0.1
        return good(8, 8)

    ranks = run(Scripted((paused_once,)), 8, clock=lambda: now_s[0])

    assert len(asked_s) == 7  # each but the first, which warms up
    assert not any(isinstance(event, PolicySlow) for event in ranks.events)


def test_no_rest_is_longer_than_a_minute():
    """However slow the policy is: the speeds change meanwhile."""
    now_s = [0.0]

    def slow(cluster, timings, state):
        now_s[0] += 30.0
        return good(8, 8)

    ranks = run(Scripted((slow,)), 4, clock=lambda: now_s[0])
    rests = [event for event in ranks.events if isinstance(event, PolicySlow)]

    assert rests == [PolicySlow(2, 30.0, 60.0)]


@pytest.mark.parametrize("seconds", [float("nan"), 0.0, -1.0, float("inf"), -float("inf")])
@pytest.mark.parametrize("field", ["compute_s", "data_s"])
def test_a_time_that_cannot_be_is_told_and_not_planned_by(field, seconds):
    """From one rank, in the middle: the plan stays, and the next step counts again."""

    def change(report, rank):
        wrong = rank == 1 and report.step in (2, 3)
        return report._replace(**{field: seconds}) if wrong else report

    ranks = run(Scripted((good(7, 9), good(6, 10), good(5, 11), good(4, 12))), 5, change=change)
    rejected = [(e.step, e.rank) for e in ranks.events if isinstance(e, MeasurementRejected)]

    if (field, seconds) == ("data_s", 0.0):  # nobody waited: a good figure
        assert rejected == []
    else:
        assert rejected == [(2, 1), (3, 1)]
        assert [plan.batch_size for plan in ranks.plans] == [(8, 8), (7, 9), (4, 12)]
    assert failures(ranks) == []


class Busy(Ranks):
    """Ranks that leave no time for books until they are asked to take it."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def later(self, call):
        self.calls.append(call)

    def keep_books(self):
        while self.calls:
            self.calls.pop(0)()


def level_run(ranks, *, lag=0, num_steps=3, after_each=lambda: None, news_in=None):
    """Have two ranks end steps level, but for one, under a policy that moves a sample each time."""
    moves = [replace(good(7 - n, 9 + n), level=1.0) for n in range(5)]
    decisions = Decisions(2, lag=lag, answers=ranks, emit=ranks.events.append)
    decisions.planner = Planner(Scripted(tuple(moves)), Job(2, 16), warm_up_steps=0)
    decisions.planner._level = 1.0
    ranks.announce(decisions.planner.plan)
    for step in range(num_steps):
        for rank in (0, 1):
            report = Report(step, 8, 16, compute_s=0.1, data_s=float(step))
            if step == news_in:
                report = report._replace(limit=15)
            decisions.take(rank, step, [report])
        after_each()
    return decisions


def test_after_a_level_step_the_answer_comes_before_the_policy():
    """It is asked when there is time; its plan is in force one plan point later."""
    ranks = Busy()
    level_run(ranks, num_steps=1)
    assert (ranks.answered, len(ranks.plans)) == ([0], 1)

    ranks.keep_books()
    assert [plan.first_step for plan in ranks.plans] == [0, 2]


def test_a_plan_made_late_leaves_steps_alone_that_were_answered_meanwhile():
    """Ranks that fetch ahead have asked for three more steps: they hold the old plan for those."""
    ranks = Busy()
    decisions = level_run(ranks, num_steps=1)
    decisions.answer(3)
    ranks.keep_books()

    assert [plan.first_step for plan in ranks.plans] == [0, 5]


def test_no_plan_is_left_out_where_there_is_no_time_for_books():
    """A step put off is made up for with the next one, and its plan is announced by itself."""
    ranks = Busy()
    level_run(ranks, num_steps=4, news_in=2)
    assert [plan.epoch for plan in ranks.plans] == [0, 1, 2, 3]
    ranks.keep_books()

    assert [plan.epoch for plan in ranks.plans] == [0, 1, 2, 3, 4]
    assert [event.step for event in ranks.events if isinstance(event, StepMeasured)] == [0, 1, 2, 3]


@pytest.mark.parametrize("lag", [0, 1])
def test_a_step_is_told_with_the_plan_it_ran_under(lag):
    """Not with the newest one."""
    ranks = Busy()
    level_run(ranks, lag=lag, num_steps=5, after_each=ranks.keep_books)
    told = {e.step: e.plan_epoch for e in ranks.events if isinstance(e, StepMeasured)}

    # Shown after step k, decided in the books of k, published with k + 1, in force lag later.
    assert told == {step: max(step - 1 - lag, 0) for step in range(5)}


def test_a_worker_that_does_not_help_is_told_of_once():
    """And only if that lasts: a worker that is slow in one check only is not worth a word."""
    ranks = Ranks()
    decisions = Decisions(2, lag=0, answers=ranks, emit=ranks.events.append)
    decisions.planner = Planner(Auto(), Job(2, 64))
    for step in range(301):
        sizes = decisions.planner.plan.batch_size
        fixed_s = 2.0 if step > 120 else 0.0
        for rank, size in enumerate(sizes):
            seconds = 0.01 * size + fixed_s * rank
            decisions.take(rank, step, [Report(step, size, 64, seconds, 0.0)])

    (told,) = [event for event in ranks.events if isinstance(event, WorkerUnhelpful)]
    assert (told.step, told.rank) == (200, 1)
    assert told.without_s == pytest.approx(0.64, rel=0.02)
    assert sum(isinstance(event, StepMeasured) for event in ranks.events) == 301


def test_where_the_time_went_is_told_when_all_have_said_it():
    """Of long steps each by itself; what is left is told at the end."""
    ranks = Ranks()
    decisions = Decisions(2, lag=0, answers=ranks, emit=ranks.events.append)
    long, short = [10**5] + [0] * 10, [10] * 11
    for step, row in enumerate((long, short)):
        decisions.received(0, TimesReport(step, tuple(row)))
        assert len(ranks.events) == step
        decisions.received(1, TimesReport(step, tuple(row)))
    assert [event.step for event in ranks.events] == [0]
    decisions.end()
    decisions.end()

    assert [event.step for event in ranks.events] == [0, 1]
    assert ranks.events[0].input_s == (0.1, 0.1)


FAILS_AT = 3


class Failing(Planner):
    """A planner with a mistake in one of its parts, in one step."""

    def __init__(self, part):
        super().__init__(Shifting(), Job(2, 16))
        self.part = part
        if part == "equal sizes too":
            self.equal_plan = None

    def observe(self, reports, *, next_step, ask=True):
        if self.part in ("observe", "equal sizes too") and reports[0].step == FAILS_AT:
            raise ZeroDivisionError("a bug of ours")
        return super().observe(reports, next_step=next_step, ask=ask)

    def account(self, reports, plan):
        if self.part == "account" and reports[0].step == FAILS_AT:
            raise ZeroDivisionError("a bug of ours")
        return super().account(reports, plan)


@pytest.fixture
def star():
    """Two exchanges over a pair of sockets, with what rank 0 emitted."""
    with pairs() as make:
        yield make


SHIFTED = [(8, 8), (8, 8), (7, 9), (6, 10)]  # as long as nothing fails


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize(("part", "after"), [("observe", (8, 8)), ("equal sizes too", (6, 10))])
def test_all_ranks_go_on_with_equal_sizes(star, caplog, part, after, lag):
    """From the same step on, for good; with the sizes of before where even equal ones fail."""
    both, emitted = star(lag=lag, planner=Failing(part))
    mine, theirs = play(both, 9)
    both[0].close()
    events = list(emitted.queue)
    (stopped,) = [event for event in events if isinstance(event, BalancingStopped)]

    assert mine == theirs
    assert mine[lag:] == SHIFTED + [after] * (6 - lag)
    assert (stopped.step, stopped.rank) == (FAILS_AT, 0)
    assert stopped.problem == "internal fault of evenstep (ZeroDivisionError: a bug of ours)"
    assert "raise ZeroDivisionError" in stopped.trace
    assert [record.exc_info is not None for record in caplog.records] == [True]
    assert "Please report it" in caplog.text
    assert not any(isinstance(event, PolicyFailed) for event in events)
    assert [event.step for event in events if isinstance(event, StepMeasured)] == list(range(9))
    assert both[0].decisions.learnt() is None


def play_alone(planner, emit, num_steps=6):
    """Return what two ranks are told by rank 0, whose books are kept at once."""
    ranks = Ranks()
    decisions = Decisions(2, lag=0, answers=ranks, emit=emit)
    decisions.planner = planner
    ranks.announce(planner.plan)
    for step in range(num_steps):
        for rank in (0, 1):
            size = ranks.plans[-1].batch_size[rank]
            decisions.take(rank, step, [Report(step, size, 16, 0.1, 0.0)])
    assert ranks.answered == list(range(num_steps)), "training did not go on"
    return ranks


def test_books_that_fail_end_the_balancing(caplog):
    """One plan point later, as they are kept when no rank waits."""
    told = []
    ranks = play_alone(Failing("account"), told.append)

    assert [plan.batch_size for plan in ranks.plans] == [(8, 8), (7, 9), (6, 10), (5, 11), (8, 8)]
    assert [plan.first_step for plan in ranks.plans] == [0, 2, 3, 4, 5]
    assert len([event for event in told if isinstance(event, BalancingStopped)]) == 1
    assert len(caplog.records) == 1


def test_a_hook_of_ours_that_fails_is_said_once(caplog):
    """The log says so, as events go nowhere any more."""

    def emit(event):
        raise BrokenPipeError("nowhere to go")

    ranks = play_alone(Planner(Shifting(), Job(2, 16)), emit)

    assert len(caplog.records) == 1
    assert "BrokenPipeError: nowhere to go" in caplog.text
    assert ranks.plans[-1].batch_size == (8, 8)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_rank_that_cannot_measure_has_all_go_on_with_equal_sizes(star, lag):
    """It says so with its report, whatever the others have measured of that step."""
    both, emitted = star(lag=lag)
    told = []
    for step in range(6 + lag):
        plans = [both[rank].at(step) for rank in (0, 1)]
        told.append([plan.batch_size for plan in plans])
        fails = step == FAILS_AT
        while both[0].newest_done < step - 1:  # pytest's own limit ends it
            pass
        (one,) = reports_of(1, step, plans[1].batch_size[1])
        report(both[0], step, [] if fails else reports_of(0, step, plans[0].batch_size[0]))
        report(both[1], step, [one._replace(fault="no clock") if fails else one])
    both[0].close()
    stopped = [event for event in list(emitted.queue) if isinstance(event, BalancingStopped)]

    assert all(mine == theirs for mine, theirs in told)
    assert [mine for mine, _ in told][lag:] == [*SHIFTED, (8, 8), (8, 8)]
    assert stopped == [BalancingStopped(FAILS_AT, 1, "no clock", "")]


def test_units_that_cannot_be_summed_end_the_run(star):
    """The weight is what makes gradients exact: no rank waits for a sum that never comes."""
    both, _ = star()
    sums = [both[0].units.add(0, 3.0), both[1].units.add(0, "many")]

    for rank in (0, 1):
        with pytest.raises(
            WorkerLostError,
            match=r"Rank 1 on b was lost: it sent .*Expected `float`, got `str`.*Units.*many",
        ):
            both[rank].units.wait(sums[rank])


@pytest.mark.parametrize("failing", [0, 1])
def test_a_loader_that_cannot_follow_a_plan_ends_the_run(star, caplog, failing):
    """Ranks with other plans than each other would train on wrong gradients."""
    both, _ = star()

    def follow(plan):
        if plan.epoch == 1:
            raise KeyError("no such sample")

    both[failing].subscribe(follow)
    for step in (0, 1):
        for rank in (0, 1):  # the later one, so rank 0 decides on its channel's thread
            both[rank].at(step)
            report(both[rank], step, reports_of(rank, step, 8))

    for rank in (0, 1):
        with pytest.raises(WorkerLostError, match=rf"Rank {failing} on .* internal fault .*sample"):
            both[rank].at(3)
    assert "Please report it" in caplog.text
