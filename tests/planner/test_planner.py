"""The planner stands between a policy and its mistakes, and bounds each plan by what fits."""

import re
from dataclasses import dataclass
from typing import final

import numpy as np
import pytest

from evenstep import Decision
from evenstep._planner import Bounds, Job, Planner, Report
from evenstep.events import (
    MeasurementRejected,
    MemoryCapped,
    PolicyFailed,
    Rebalanced,
    SizesHeld,
    StepMeasured,
)
from evenstep.policies import AbstractPolicy, Auto, Equal, Lbb

SECONDS_PER_SAMPLE = (0.01, 0.01, 0.04)


def reports_of(plan, step, *, seconds=SECONDS_PER_SAMPLE, tail=False, **changed):
    """Return what the workers would report for ``plan``, time proportional to samples."""
    sizes = plan.tail if tail else plan.batch_size
    total = sum(sizes)
    return [
        Report(step, size, total, compute_s=size * s or 1e-3, data_s=0.0, **changed)
        for size, s in zip(sizes, seconds, strict=True)
    ]


def show(planner, reports, *, next_step):
    """Show ``planner`` one step and return all that it says, in the order a driver tells it."""
    plan = planner.plan
    events = planner.observe(reports, next_step=next_step)
    measured = planner.account(reports, plan)
    return [*([measured] if measured else []), *events]


def run(planner, num_steps, **changed):
    """Drive ``planner`` and return all events."""
    events = []
    for step in range(num_steps):
        events += show(planner, reports_of(planner.plan, step, **changed), next_step=step + 1)
    return events


def kinds(events):
    """Return the classes of ``events``."""
    return [type(event) for event in events]


@final
@dataclass(frozen=True)
class Broken(AbstractPolicy[int]):
    """Fails in the way asked for, from its second update on."""

    way: str
    name = "broken"

    def init(self, cluster):
        return Decision(np.full(3, cluster.global_batch_size // 3), 0, "equal")

    def update(self, cluster, timings, state):
        good = np.full(3, cluster.global_batch_size // 3)
        if state == 0:
            return Decision(good + np.array([1, 0, -1]), 1, "one good plan")
        if self.way == "raises":
            raise KeyError("lost")
        bad = {
            "sum": good + 1,
            "bounds": good + np.array([good[0], 0, -good[0]]),
            "floats": good / 1.0,
            "shape": good[:2],
        }
        return Decision(bad[self.way], 1, "bad")


def test_the_first_step_warms_up_and_decides_nothing():
    """Its time is reported, and no plan follows from it."""
    planner, near = Planner(Auto(), Job(3, 96)), (0.01, 0.01, 0.019)

    first = show(planner, reports_of(planner.plan, 0, seconds=near), next_step=1)
    second = show(planner, reports_of(planner.plan, 1, seconds=near), next_step=2)

    assert kinds(first) == [StepMeasured]
    assert kinds(second) == [StepMeasured, Rebalanced]
    assert planner.plan.first_step == 2
    assert planner.plan.epoch == 1


@pytest.mark.parametrize(("most", "sizes"), [(60, (43, 43, 10)), ((40, 60, 60), (40, 45, 11))])
def test_auto_guesses_by_a_first_step_in_which_workers_are_far_apart(most, sizes):
    """In proportion to the speeds, within the bounds; nothing is learnt, and no rule does so."""
    planner, rule = (Planner(one, Job(3, 96, bounds=Bounds(max=most))) for one in (Auto(), Lbb()))
    warm_up = tuple(1.5 * seconds for seconds in SECONDS_PER_SAMPLE)
    for each in (planner, rule):
        show(each, reports_of(each.plan, 0, seconds=warm_up), next_step=1)

    assert (planner.plan.batch_size, planner.plan.first_step) == (sizes, 1)
    assert rule.plan.batch_size == (32, 32, 32)
    assert not planner.learnt()["policy_state"]["filter"]["num_steps"].any()


def test_a_step_says_what_it_cost_and_what_the_equal_split_would_have():
    """Idle time against the slowest, the equal split and the best one by the fitted times."""
    planner = Planner(Equal(), Job(3, 96))

    measured = [e for e in run(planner, 3) if isinstance(e, StepMeasured)][-1]

    assert measured.compute_s == pytest.approx((0.32, 0.32, 1.28))
    assert measured.idle_s == pytest.approx((0.96, 0.96, 0.0))
    assert measured.idle_share == pytest.approx(2 * 0.96 / (3 * 1.28))
    assert measured.makespan_s == pytest.approx(1.28)
    assert measured.equal_split_s == pytest.approx(1.28, rel=0.05)
    assert measured.best_split_s == pytest.approx(96 / 225, rel=0.1)


def test_at_the_equal_split_the_equal_split_costs_what_it_costs():
    """Also in a step in which a worker was held up: nothing is claimed to be saved or lost."""
    planner = Planner(Equal(), Job(3, 96))
    run(planner, 5)
    reports = reports_of(planner.plan, 5)
    reports[0] = reports[0]._replace(compute_s=5.0)

    (measured,) = show(planner, reports, next_step=6)

    assert measured.equal_split_s == pytest.approx(measured.makespan_s) == 5.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_time_that_cannot_be_is_named_and_left_out(bad):
    """The plan in force stays, and the next good step is planned by as ever."""
    planner = Planner(Auto(), Job(3, 96))
    run(planner, 3)
    before = planner.plan
    reports = reports_of(before, 3)
    reports[1] = reports[1]._replace(compute_s=bad)

    events = show(planner, reports, next_step=4)

    assert planner.plan is before
    assert kinds(events) == [MeasurementRejected]
    assert (events[0].step, events[0].rank) == (3, 1)
    assert str(bad) in events[0].problem
    assert StepMeasured in kinds(run(planner, 2))


@pytest.mark.parametrize("way", ["raises", "sum", "bounds", "floats", "shape"])
def test_a_broken_policy_leaves_the_last_good_plan(way):
    """Training goes on with it, and the event says what was wrong."""
    planner = Planner(Broken(way), Job(3, 96))

    events = run(planner, 4)

    assert planner.plan.batch_size == (33, 32, 31)
    failed = [event for event in events if isinstance(event, PolicyFailed)]
    assert len(failed) == 2
    assert ("lost" if way == "raises" else "Broken gave") in failed[0].problem


def test_sizes_that_break_granules_are_no_plan():
    """Every forward would have another shape: one worker may carry what is left, and not two."""
    planner = Planner(Broken("sum"), Job(3, 96, bounds=Bounds(granularity=8)))

    events = run(planner, 2)

    (failed,) = [event for event in events if isinstance(event, PolicyFailed)]
    assert "[33, 32, 31], more than one of them in no whole granules" in failed.problem
    assert planner.plan.batch_size == (32, 32, 32)


def test_a_plan_that_stays_the_same_is_the_same_plan():
    """No event, no new epoch."""
    planner = Planner(Equal(), Job(3, 96))
    first = planner.plan

    events = run(planner, 5)

    assert planner.plan is first
    assert Rebalanced not in kinds(events)


@pytest.mark.parametrize("tail_size", [1, 2, 50, 95])
def test_the_tail_is_shared_out_whole(tail_size):
    """Smallest sizes do not bind there, proportions do."""
    planner = Planner(Auto(), Job(3, 96, tail_size=tail_size))
    run(planner, 10)

    tail = np.array(planner.plan.tail)

    assert tail.sum() == tail_size
    assert (tail >= 0).all()
    share = np.array(planner.plan.batch_size) * tail_size / 96
    assert (abs(tail - share) <= 1).all()


def test_a_short_step_is_measured_and_not_planned_by():
    """Its sizes are not the policy's own."""
    planner = Planner(Auto(), Job(3, 96, tail_size=30))
    run(planner, 1)
    before = planner.plan

    events = show(planner, reports_of(before, 1, tail=True), next_step=2)

    assert kinds(events) == [StepMeasured]
    assert events[0].batch_size == before.tail
    assert planner.plan is before


def memory_reports(plan, step, capacity, *, bytes_per_sample=10, fixed=100):
    """Return reports whose peaks are affine in the batch, with ``capacity`` on rank 0."""
    return [
        report._replace(
            peak_bytes=fixed + bytes_per_sample * report.batch_size,
            capacity_bytes=capacity if rank == 0 else 10**9,
        )
        for rank, report in enumerate(
            reports_of(plan, step, seconds=(0.002, 0.02, 0.02))  # rank 0 would take 80 of 96
        )
    ]


def test_no_plan_exceeds_what_fits():
    """The fast worker fits 1.4 times the equal share, and its speed asks for 2.5 times."""
    planner = Planner(Auto(), Job(3, 96))
    fits = int(1.4 * 32)
    capacity = 100 + 10 * fits
    equal_s = 0.02 * 32
    makespans = []
    for step in range(20):
        reports = memory_reports(planner.plan, step, capacity)
        makespans.append(max(report.compute_s for report in reports))
        assert planner.plan.batch_size[0] <= fits
        assert sum(planner.plan.batch_size) == 96
        planner.observe(reports, next_step=step + 1)

    assert planner.plan.batch_size[0] > 32
    assert makespans[-1] < 0.95 * equal_s


def test_a_worker_with_half_the_memory_never_runs_out():
    """Four workers of any speeds, peaks that are noisy and bend upwards, 100 seeds."""
    reached = []
    for seed in range(100):
        chance = np.random.default_rng(seed)
        speed, equal = chance.uniform(1, 4, 4), 4 * int(chance.integers(4, 30))
        fixed = equal * chance.uniform(0.2, 2)
        room = (fixed + 1.3 * equal) / chance.uniform(0.5, 0.85)
        capacity = room * np.where(np.arange(4) == chance.integers(4), 1, 2)
        planner = Planner(Auto(), Job(4, 4 * equal))
        for step in range(15):
            sizes = np.array(planner.plan.batch_size)
            peak = (fixed + sizes * (1 + 0.3 * sizes / equal)) * chance.uniform(1, 1.03, 4)
            assert (peak <= capacity).all()
            seconds = 0.02 * sizes / speed * np.exp(chance.normal(0, 0.03, 4))
            told = zip(sizes.tolist(), seconds, peak, capacity, strict=True)
            reports = [
                Report(step, n, 4 * equal, s, 0.0, peak_bytes=int(p), capacity_bytes=int(c))
                for n, s, p, c in told
            ]
            planner.observe(reports, next_step=step + 1)
        reached.append((sizes / speed).max() / (4 * equal / speed.sum()))

    assert np.median(reached) < 1.1  # of the optimum without limits


def test_a_batch_that_does_not_fit_grows_nobody():
    """All workers together are short of memory: what runs goes on, and the event says so once."""
    planner = Planner(Auto(), Job(3, 96))
    events = []
    for step in range(6):
        reports = [
            report._replace(capacity_bytes=300)
            for report in memory_reports(planner.plan, step, 300)
        ]
        events += show(planner, reports, next_step=step + 1)

    assert planner.plan.batch_size == (32, 32, 32)
    (short,) = [event for event in events if isinstance(event, SizesHeld)]
    assert re.search(r"fit \d+ each, \d+ in all, and the global batch is 96\)", short.problem)
    assert PolicyFailed not in kinds(events)


def test_sizes_grow_again_once_memory_is_there_again():
    """Another process took it for one step; what fits after it is what fitted before."""
    planner, events = Planner(Auto(), Job(3, 96)), []
    for step in range(20):
        capacity = 300 if step == 1 else 10**4
        reports = [
            report._replace(capacity_bytes=capacity)
            for report in memory_reports(planner.plan, step, capacity)
        ]
        events += show(planner, reports, next_step=step + 1)

    assert SizesHeld in kinds(events)
    assert planner.plan.batch_size[0] > 60


def test_a_cap_that_becomes_known_is_told():
    """The event names the rank, the size and what the device offers."""
    planner = Planner(Auto(), Job(3, 96))

    events = planner.observe(memory_reports(planner.plan, 0, 500), next_step=1)

    capped = [event for event in events if isinstance(event, MemoryCapped)]
    assert capped[0].rank == 0
    assert capped[0].capacity_bytes == 500
    assert 32 <= capped[0].max_batch_size <= 40


def test_micro_batches_take_what_one_forward_does_not_fit():
    """In loops that cut, caps bound a forward and not the local batch."""
    job = Job(3, 96, bounds=Bounds(max=(10, 96, 96)), cuts=True)
    planner = Planner(Auto(), job)

    run(planner, 10, seconds=(0.004, 0.01, 0.02))

    assert planner.plan.max_forward == (10, 96, 96)
    assert planner.plan.batch_size[0] > 40


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"min": -1}, r"`Bounds\(min=...\)` must be an integer >= 0"),
        ({"max": 0}, r"`Bounds\(max=...\)` must be an integer >= 1"),
        ({"granularity": (8, 0)}, r"`Bounds\(granularity=...\)` must be an integer >= 1"),
        ({"max": 2.5}, r"got 2\.5"),
    ],
)
def test_bounds_that_are_no_counts_are_refused(bounds, message):
    """The message gives class and argument, rule, value and remedy."""
    with pytest.raises(ValueError, match=message):
        Bounds(**bounds)


def tiny_steps(seed):
    """Return what a run of millisecond steps was told of the equal split, over what it cost.

    Two equal workers with next to nothing per sample, so that all splits cost about the same,
    with 20 % noise and pauses of up to 40 ms that last for up to three steps.
    """
    rng, planner = np.random.default_rng(seed), Planner(Auto(), Job(2, 100))
    paused, told = np.zeros(2), []
    for step in range(300):
        sizes = np.array(planner.plan.batch_size)
        starts = rng.random(2) < 0.02
        paused = np.where(starts, rng.integers(1, 4, 2), np.maximum(paused - 1, 0))
        seconds = (7e-4 + 3e-6 * sizes) * np.exp(0.2 * rng.standard_normal(2))
        seconds += np.where(paused > 0, rng.uniform(3e-3, 4e-2, 2), 0.0)
        reports = [
            Report(step, int(size), 100, float(taken), 0.0)
            for size, taken in zip(sizes, seconds, strict=True)
        ]
        events = show(planner, reports, next_step=step + 1)
        told += [
            event.equal_split_s / event.makespan_s
            for event in events
            if isinstance(event, StepMeasured) and event.equal_split_s is not None
        ]
    return np.median(told)


def test_pauses_of_a_busy_machine_do_not_pass_for_speeds():
    """What balancing saves is not made up where fixed costs and pauses rule."""
    told = [tiny_steps(seed) for seed in range(9)]

    assert np.median(told) == pytest.approx(1.0, rel=0.3)


def limited(planner, step, rank, limit, *, again):
    """Return a step's reports, one of which has found what fits."""
    reports = reports_of(planner.plan, step)
    seconds = 0.0 if again else reports[rank].compute_s
    reports[rank] = reports[rank]._replace(limit=limit, again=again, compute_s=seconds)
    return reports


@pytest.mark.parametrize("again", [True, False])
def test_what_a_worker_found_not_to_fit_is_a_cap(again):
    """Out of memory or probed: told once, never grown over, in plain loops by smaller batches."""
    planner = Planner(Auto(), Job(3, 96))
    run(planner, 5)
    assert planner.plan.batch_size[0] > 30

    events = show(planner, limited(planner, 5, 0, 20, again=again), next_step=6)

    assert MemoryCapped(5, 0, 20, 0) in events
    assert (MeasurementRejected in kinds(events)) == again
    assert MemoryCapped not in kinds(run(planner, 20))
    assert planner.plan.batch_size[0] == 20
    assert sum(planner.plan.batch_size) == 96


def test_a_limit_never_rises():
    """A second, larger one says nothing new."""
    planner = Planner(Auto(), Job(3, 96, cuts=True))
    show(planner, limited(planner, 0, 1, 12, again=True), next_step=1)
    show(planner, limited(planner, 1, 1, 50, again=False), next_step=2)
    run(planner, 5)

    assert planner.plan.max_forward[1] == 12


def test_limits_that_leave_no_way_are_told_and_nothing_grows():
    """Three workers of 10 samples for a global batch of 96: the plan stays, an event says it."""
    planner = Planner(Auto(), Job(3, 96))
    reports = [report._replace(limit=10) for report in reports_of(planner.plan, 0)]

    events = show(planner, reports, next_step=1)

    assert SizesHeld in kinds(events)
    assert planner.plan.batch_size == (32, 32, 32)


def test_a_guess_by_the_first_step_stays_under_the_caps_of_that_step():
    """Three quarters of the memory held 32 samples; the speeds alone would give 43."""
    planner, memory = Planner(Auto(), Job(3, 96)), {"peak_bytes": 75, "capacity_bytes": 100}
    slow = tuple(1.5 * seconds for seconds in SECONDS_PER_SAMPLE)
    events = show(planner, reports_of(planner.plan, 0, seconds=slow, **memory), next_step=1)
    caps = {event.rank: event.max_batch_size for event in events if isinstance(event, MemoryCapped)}

    assert planner.plan.epoch == 1
    assert 32 < planner.plan.batch_size[0] <= caps[0] < 43
