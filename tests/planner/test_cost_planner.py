"""Plans by cost: learnt from reports, and back to counts where lengths tell nothing."""

import numpy as np
import pytest

from evenstep._planner import Cost, CostPlanner, EqualSizes, Job, Report, Work
from evenstep.events import MeasurementRejected
from evenstep.solve import partition

SPEED = np.array([1.0, 1.0, 2.0, 4.0])
WORLD_SIZE, BATCH_SIZE = 4, 64
LENGTH = np.clip(np.random.default_rng(0).lognormal(5, 1, 4096), 8, 1000).astype(int)


class Run:
    """Steps whose true times are known, as the ranks of a run would report them.

    Args:
        length: of every sample.
        true: seconds of a sample, of a token, and of a token squared, at speed 1.
        noise: of a time, relative.
        settings: of the planner.
    """

    def __init__(self, length=LENGTH, *, true=(0, 1e-4, 4e-7), noise=0.02, **settings):
        self.costs = Cost(length).table(range(len(length)))
        job = Job(WORLD_SIZE, BATCH_SIZE)
        self.planner = CostPlanner(job, self.costs, kinds=[0] * WORLD_SIZE, **settings)
        self.true, self.noise, self.speed = np.array(true), noise, SPEED
        self.rng = np.random.default_rng(1)
        self.plans, self.over, self.events = [self.planner.plan], [], []

    def step(self, step, **changed):
        """Run a step; note its time over the bound."""
        plan = next(plan for plan in reversed(self.plans) if plan.first_step <= step)
        features = self.costs.features(self.rng.integers(0, len(LENGTH), BATCH_SIZE))
        owner = np.repeat(np.arange(WORLD_SIZE), plan.batch_size)
        if plan.costs is not None:
            owner = partition(features, plan.costs.workers()).owner
        own = np.array([features[owner == rank].sum(axis=0) for rank in range(WORLD_SIZE)])
        took = own @ self.true / self.speed
        self.over.append(took.max() / (features @ self.true).sum() * self.speed.sum())
        took *= 1 + self.noise * self.rng.standard_normal(WORLD_SIZE)
        work = [Work(tuple(map(int, one)), (0, 0, 0), (0, 0, 0)) for one in own]
        reports = [
            Report(step, int(n), BATCH_SIZE, float(s), 0.0, work=w, **changed)
            for n, s, w in zip(np.bincount(owner, minlength=WORLD_SIZE), took, work, strict=True)
        ]
        outcome = self.planner.observe(reports, next_step=step + 1)
        self.events += [*outcome.events, *self.planner.catch_up(next_step=step + 2).events]
        if self.planner.plan.epoch != self.plans[-1].epoch:
            self.plans.append(self.planner.plan)

    def run(self, num_steps, first=0):
        for step in range(first, first + num_steps):
            self.step(step)
        return self


def test_it_learns_speeds_and_lengths_within_twenty_steps():
    """Steps within 8 % of the bound from then on, most within 4 %."""
    over = Run().run(80).over

    assert max(over[20:]) <= 1.08
    assert np.median(over[20:]) <= 1.04
    assert np.median(over[:2]) > 1.5  # or there was nothing to learn


def test_a_rank_that_slows_down_is_followed():
    """Twice as slow from step 60 on: within 10 % of the new bound 20 steps later."""
    run = Run().run(60)
    run.speed = SPEED / np.array([1, 1, 1, 2])

    over = run.run(60, first=60).over

    assert np.median(over[60:64]) > 1.2
    assert np.median(over[80:]) <= 1.1


def test_only_lengths_are_balanced_with_equal_speeds_asked_for():
    """Every rank has the same integers."""
    costs = Run(by_speed=False).run(30).planner.plan.costs

    assert len(set(costs.slope)) == len(set(costs.intercept)) == 1


def test_where_lengths_tell_nothing_plans_count():
    """A time that goes by the number of samples: by count, with a word; sizes by speed."""
    run = Run(true=(1e-2, 0, 0)).run(80)

    assert run.planner.plan.costs is None
    assert "lengths tell no more" in run.planner.plan.reason
    assert np.allclose(run.planner.plan.batch_size, 8 * SPEED, atol=1)
    assert np.median(run.over[60:]) <= 1.08


def test_where_lengths_matter_plans_do_not_come_back_to_counts():
    """Perfect balance makes all times alike, which is no sign that lengths do not matter."""
    run = Run(noise=0.05).run(200)

    assert all(plan.costs is not None for plan in run.plans)


def test_a_plan_follows_seldom_once_costs_are_known():
    """A new plan moves samples that were fetched: fewer than one in ten steps, of plain noise."""
    run = Run(noise=0.03).run(100)
    before = len(run.plans)

    assert len(run.run(100, first=100).plans) - before <= 10


def test_a_small_change_waits_for_what_is_fetched():
    """A large one does not."""
    late = {}
    for name, factor in {"small": 1.06, "large": 2}.items():
        run = Run(ahead=9).run(60)
        run.speed = SPEED / np.array([1, factor, 1, 1])
        number = len(run.plans)
        step = 60
        while len(run.plans) == number:
            run.step(step)
            step += 1
        late[name] = run.plans[-1].first_step - step

    assert late == {"small": 10, "large": 1}


def test_a_report_that_cannot_be_teaches_nothing():
    """It is named, and the plan stays."""
    run = Run().run(30)
    plan = run.planner.plan
    run.step(30, fault="its clock broke")

    assert run.planner.plan is plan
    assert [e.rank for e in run.events if isinstance(e, MeasurementRejected)] == [0, 1, 2, 3]


@pytest.mark.parametrize(("former", "how"), [([2, 3, 0, 1], "rehearsed"), ([0, -1, 2, 3], "anew")])
def test_a_run_goes_on_from_what_was_learnt(former, how):
    """On the same workers at other ranks; with a new one it starts anew."""
    learnt = Run().run(40).planner.learnt()
    run = Run()
    restored = run.planner.restore(learnt, np.array(former))
    run.plans = [run.planner.plan]
    run.speed = SPEED[np.maximum(former, 0)]

    assert restored.policy == how
    assert (np.median(run.run(3).over) <= 1.1) == (how == "rehearsed")


def test_what_else_the_samples_would_have_cost_is_told():
    """At equal counts, by speeds alone, by lengths alone, and at best: by the model."""
    run = Run(noise=0.0).run(30)
    features = run.costs.features(np.arange(BATCH_SIZE))
    owner = partition(features, run.planner.plan.costs.workers()).owner
    parts = np.split(features, WORLD_SIZE)
    own = [features[owner == rank].sum(axis=0) for rank in range(WORLD_SIZE)]
    counted = np.split(features, np.cumsum([8, 8, 16]))
    works = [
        Work(*(tuple(map(int, one)) for one in (mine, part.sum(axis=0), count.sum(axis=0))))
        for mine, part, count in zip(own, parts, counted, strict=True)
    ]
    reports = [
        Report(30, 16, BATCH_SIZE, float(mine @ run.true / speed), 0.0, work=work)
        for mine, speed, work in zip(own, SPEED, works, strict=True)
    ]
    told = run.planner.account(reports, run.planner.plan)
    equal = max(
        part.sum(axis=0) @ run.true / speed for part, speed in zip(parts, SPEED, strict=True)
    )

    by_speed = max(part.sum(axis=0) @ run.true / s for part, s in zip(counted, SPEED, strict=True))
    whole = (features @ run.true).sum()

    assert told.equal_split_s == pytest.approx(equal, rel=0.05)
    assert told.speed_split_s == pytest.approx(by_speed, rel=0.05)
    assert told.cost_split_s == pytest.approx(whole / WORLD_SIZE, rel=0.05)
    assert told.best_split_s == pytest.approx(whole / SPEED.sum(), rel=0.05)


@pytest.mark.parametrize("cap", [None, 1000])
def test_after_a_fault_plans_are_equal_and_still_fit(cap):
    """The short last step has its sizes too; where forwards have caps, those hold."""
    costs = Cost(LENGTH, padded=False, max_size=cap).table(range(len(LENGTH)))
    job = Job(WORLD_SIZE, BATCH_SIZE, tail_size=6)
    failed = CostPlanner(job, costs, kinds=[0] * WORLD_SIZE)
    plan = EqualSizes(failed, 5).plan

    assert plan.batch_size == (16, 16, 16, 16)
    assert sum(plan.tail) == 6
    assert (plan.costs is None) == (cap is None)
