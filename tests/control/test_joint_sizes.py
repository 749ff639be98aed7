"""Sizes make up for the exchange where that gains, for nothing where it proves slower."""

from dataclasses import dataclass, field
from typing import final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import AffineTime, Cluster, Decision, StepTimings
from evenstep._minmax import allocate
from evenstep.control import Computing, Job, JointSizes, Planner, Report, plan_jointly, timeline_s
from evenstep.policies import AbstractPolicy
from evenstep.sharding import Aggregation, Links, optimal_shares

from .networks import mbit

TIMES = AffineTime(np.full(4, 0.02), 1 / np.array([20.0, 30, 60, 80]))
CLUSTER = Cluster(4, 64)
GAINS = Aggregation(4, 4_000_000, num_chunks=8), mbit(150, 150, 150, 50)
USELESS = Aggregation(4, 4_000_000, num_chunks=16), mbit(100, 100, 100, 100)
EVERY = 8


@final
@dataclass(frozen=True)
class Exact(AbstractPolicy[int]):
    """Knows what a sample costs, and takes all else that it is shown for a fixed cost."""

    slope_s: tuple[float, ...] = field(default=tuple(TIMES.slope_s.tolist()))
    name = "exact"

    def init(self, cluster):
        return Decision(np.array([16, 16, 16, 16]), 0, "start")

    def update(self, cluster, timings, state):
        slope_s = np.array(self.slope_s)
        fixed_s = np.maximum(timings.compute_s - slope_s * timings.batch_size, 0.0)
        return Decision(allocate(AffineTime(fixed_s, slope_s), cluster), 0, "exact")


def drawn(seed):
    """Workers, links, an aggregation and shares in force."""
    random = np.random.default_rng(seed)
    size = int(random.integers(3, 6))
    times = AffineTime(random.uniform(0, 0.05, size), np.exp(random.uniform(-5, -3, size)))
    links = Links(random.uniform(3, 20, size) * 1e6)
    aggregation = Aggregation(size, 1_000_000, num_chunks=int(random.choice([4, 8, 16])))
    return times, Cluster(size, 16 * size), aggregation, links, optimal_shares(aggregation, links)


def computing(sizes, wall_s, times=TIMES):
    """What is known after a step with these sizes."""
    timings = StepTimings(sizes, times.seconds(sizes), np.zeros(len(sizes)))
    return Computing(times, CLUSTER, timings, wall_s)


def played(joint, case, walls, *, first_step=0, shares=None):
    """Steps of so many seconds each, with sizes that follow; events, with what came of them."""
    aggregation, links = case
    shares = optimal_shares(aggregation, links) if shares is None else shares
    told = []
    for step, wall_s in enumerate(walls, first_step):
        fixed_s = TIMES.intercept_s + joint.extra_s
        sizes = allocate(AffineTime(fixed_s, TIMES.slope_s), CLUSTER)
        told += joint.observe(step, computing(sizes, wall_s), links, shares)
    return told


def separate_s(case):
    aggregation, links = case
    compute_s = TIMES.seconds(allocate(TIMES, CLUSTER))
    return timeline_s(compute_s, aggregation, links, shares=optimal_shares(aggregation, links))


@given(seed=st.integers(0, 2**31), overlap=st.sampled_from([0.0, 0.5]))
def test_sizes_that_end_with_what_they_make_up_for_are_the_plans(seed, overlap):
    """Shares that are given stay, nothing is slower, and no gain is zeros."""
    times, cluster, aggregation, links, shares = drawn(seed)
    plan = plan_jointly(times, cluster, aggregation, links, shares=shares, overlap=overlap)
    shown = AffineTime(times.intercept_s + plan.extra_s, times.slope_s)

    assert plan.shares is shares
    assert allocate(shown, cluster).tolist() == plan.batch_size.tolist()
    assert plan.extra_s.min() >= 0
    assert plan.extra_s.any() == plan.gains
    assert plan.step_s <= plan.separate_s


def test_any_policy_balances_what_it_is_shown():
    """Computing and what is made up for; events have the times as they were measured."""
    aggregation, links = GAINS
    plan = plan_jointly(TIMES, CLUSTER, aggregation, links)
    planner, sizes = Planner(Exact(), Job(4, 64), warm_up_steps=0), np.full(4, 16)
    for step in range(2):
        if step:
            planner.compensate(plan.extra_s)
        seconds = TIMES.seconds(sizes)
        pairs = zip(sizes.tolist(), seconds.tolist(), strict=True)
        reports = [Report(step, size, 64, taken_s, 0.0) for size, taken_s in pairs]
        ran = planner.plan
        planner.observe(reports, next_step=step + 1)
        assert planner.account(reports, ran).compute_s == tuple(seconds.tolist())
        sizes = np.array(planner.plan.batch_size)
        if not step:
            assert sizes.tolist() == allocate(TIMES, CLUSTER).tolist()

    assert plan.gains
    assert sizes.tolist() == plan.batch_size.tolist()
    planner.compensate(np.zeros(4))
    timings = StepTimings(sizes, TIMES.seconds(sizes), np.zeros(4))
    planner.observe_timings(2, timings, next_step=3)
    assert list(planner.plan.batch_size) == allocate(TIMES, CLUSTER).tolist()


def test_level_is_what_is_shown():
    """A step that ended level is not, with what a batch is to make up for."""
    planner = Planner(Levelled(), Job(2, 16), warm_up_steps=0)
    reports = [Report(0, 8, 16, 1.0, 0.0), Report(0, 8, 16, 1.01, 0.0)]
    planner.observe(reports, next_step=1)
    assert planner.is_behind

    planner.compensate(np.array([0.0, 0.5]))
    planner.observe(reports, next_step=2)
    assert not planner.is_behind


@final
@dataclass(frozen=True)
class Levelled(AbstractPolicy[int]):
    """Need not see steps within a tenth."""

    name = "levelled"

    def init(self, cluster):
        return Decision(np.array([8, 8]), 0, "start", 0.1)

    def update(self, cluster, timings, state):
        return Decision(np.array([8, 8]), 0, "stays", 0.1)


def test_it_begins_where_it_gains():
    """After a look at some steps; the event has the model's seconds."""
    joint, usual_s = JointSizes(GAINS[0]), separate_s(GAINS)
    assert played(joint, GAINS, [usual_s] * EVERY) == []
    (event,) = played(joint, GAINS, [usual_s], first_step=EVERY)

    assert joint.is_joint
    assert event.step == EVERY
    assert event.extra_s == tuple(joint.extra_s.tolist())
    assert event.step_s < 0.98 * event.separate_s
    assert "less by the model" in event.reason


def test_where_nothing_is_gained_nothing_changes():
    """The very same zeros, for ever."""
    joint = JointSizes(USELESS[0])
    before = joint.extra_s

    assert played(joint, USELESS, [1.0] * 50) == []
    assert joint.extra_s is before
    assert not before.any()


@pytest.mark.parametrize("seed", range(3))
def test_it_ends_if_steps_are_slower_than_before(seed):
    """By more than their noise explains; then not again for 100 steps, then 200."""
    joint, usual_s = JointSizes(GAINS[0]), separate_s(GAINS)
    noise = np.random.default_rng(seed).normal(1, 0.03, 400)
    told = played(joint, GAINS, usual_s * noise[:20])
    assert joint.is_joint
    told = played(joint, GAINS, 1.15 * usual_s * noise[20:60], first_step=20)

    assert not joint.is_joint
    assert "steps took" in told[0].reason
    assert told[0].extra_s == (0.0,) * 4
    assert len(told) == 1
    again = played(joint, GAINS, usual_s * noise[60:200], first_step=60)
    assert again[0].step >= told[0].step + 100
    ended = played(joint, GAINS, 1.15 * usual_s * noise[:40], first_step=200)
    assert not joint.is_joint
    assert played(joint, GAINS, usual_s * noise[:150], first_step=ended[0].step) == []


@pytest.mark.parametrize("seed", range(3))
def test_noise_alone_does_not_end_it(seed):
    """Steps as before that scatter by 5 %."""
    joint, usual_s = JointSizes(GAINS[0]), separate_s(GAINS)
    noise = np.random.default_rng(seed).normal(1, 0.05, 120)

    assert len(played(joint, GAINS, 0.98 * usual_s * noise)) == 1
    assert joint.is_joint


def test_it_ends_with_the_shares():
    """Plain all-reduce hides nothing; nor is there anything to plan by while sizes are held."""
    for shares, known in ((None, True), (optimal_shares(*GAINS), False)):
        joint = JointSizes(GAINS[0])
        played(joint, GAINS, [separate_s(GAINS)] * 20)
        assert joint.is_joint
        step = computing(np.array([7, 11, 24, 22]), 1.0) if known else None
        (event,) = joint.observe(20, step, GAINS[1], shares)

        assert not joint.is_joint
        assert "no longer by shares" in event.reason


def test_it_ends_where_links_have_become_such_that_it_gains_nothing():
    """By the model."""
    joint = JointSizes(GAINS[0])
    played(joint, GAINS, [separate_s(GAINS)] * 20)
    assert joint.is_joint
    equal = GAINS[0], USELESS[1]
    told = played(joint, equal, [separate_s(equal)] * 2 * EVERY, first_step=20)

    assert not joint.is_joint
    assert "gain nothing any more" in told[-1].reason


def test_sizes_that_do_not_follow_make_up_for_nothing():
    """Those of a fixed policy, on workers that are not alike."""
    joint, (aggregation, links) = JointSizes(GAINS[0]), GAINS
    shares = optimal_shares(aggregation, links)
    for step in range(40):
        assert joint.observe(step, computing(np.full(4, 16), 1.0), links, shares) == ()
    assert not joint.is_joint


def test_one_exchange_that_looks_at_a_link_is_no_change():
    """Other shares for one step, in between."""
    joint, usual_s = JointSizes(GAINS[0]), separate_s(GAINS)
    played(joint, GAINS, [usual_s] * 20)
    extra_s = joint.extra_s
    for step in range(20, 60, 2):
        played(joint, GAINS, [9.0], first_step=step, shares=np.array([0.4, 0.3, 0.2, 0.1]))
        assert played(joint, GAINS, [usual_s], first_step=step + 1) == []

    assert joint.extra_s is extra_s


def test_ranks_that_only_serve_are_left_alone():
    """Their place among the workers is not known."""
    works = np.array([True, True, True, True, False])
    links = mbit(150, 150, 150, 50, 200)
    aggregation = Aggregation(5, 4_000_000, num_chunks=8, is_worker=works)
    joint, shares = JointSizes(aggregation), np.full(5, 0.2)
    for step in range(20):
        known = computing(allocate(TIMES, CLUSTER), 1.0)
        assert joint.observe(step, known, links, shares) == ()
    assert joint.extra_s.tolist() == [0.0] * 4


def test_what_is_out_of_range_is_refused():
    """By name."""
    with pytest.raises(ValueError, match=r"JointSizes\(overlap="):
        JointSizes(GAINS[0], overlap=1.1)
    with pytest.raises(ValueError, match=r"JointSizes\(margin="):
        JointSizes(GAINS[0], margin=float("nan"))
