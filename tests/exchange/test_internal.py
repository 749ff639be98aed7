"""What fails in evenstep itself costs the balancing, or ends the run: it is no user's mistake."""

import pytest

from evenstep._exchange._decisions import Decisions
from evenstep._planner import Job, Planner, Report
from evenstep.events import BalancingStopped, PolicyFailed, StepMeasured
from evenstep.exceptions import WorkerLostError

from .exchanges import Shifting, pairs, report, reports_of
from .test_decisions import Ranks
from .test_exchange import play

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
            match=r"Rank 1 on b was lost: it sent .*Expected `float`, got `str`.*UnitsReport.*many",
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
