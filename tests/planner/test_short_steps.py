"""Steps of a few milliseconds are decided on together, and when is known beforehand."""

import numpy as np
import pytest

from evenstep import AffineTime, Cluster, StepTimings, allocate
from evenstep._planner import Bounds, ClaimSwitch, Job, Planner, Report
from evenstep.claims import Hybrid
from evenstep.policies import Auto, Equal, Every, LbBsp2020

NOISES = {
    "lognormal": lambda rng: np.exp(0.4 * rng.standard_normal((600, 3))),
    "pauses": lambda rng: np.where(rng.random((600, 3)) < 0.05, rng.uniform(2, 20, (600, 3)), 1.0),
    "none": lambda rng: np.ones((600, 3)),
}


def timings(sizes, compute_s):
    """Return a step without waits for input."""
    return StepTimings(np.array(sizes), compute_s, data_s=np.zeros(len(sizes)))


def run(policy, fixed_s, slope_s, factors, **settings):
    """Return the sizes of each step, and after how many more of them the next plan was due."""
    planner = Planner(policy, Job(3, 96), **settings)
    sizes, holds = [planner.plan.batch_size], []
    for step, factor in enumerate(factors):
        compute_s = (fixed_s + slope_s * np.array(sizes[-1])) * factor
        planner.observe_timings(step, timings(sizes[-1], compute_s), next_step=step + 1)
        holds.append(planner.hold)
        planner.catch_up(next_step=step + 2)
        sizes.append(planner.plan.batch_size)
    return sizes, holds


@pytest.mark.parametrize("noise", ["lognormal", "pauses"])
@pytest.mark.parametrize("seed", range(3))
def test_equal_workers_keep_the_equal_split(seed, noise):
    """A few milliseconds each, mostly fixed cost, with next to nothing in them but noise."""
    factors = NOISES[noise](np.random.default_rng(seed))

    sizes, _ = run(Auto(), 1e-3, np.full(3, 2e-5), factors)

    assert set(sizes) == {(32, 32, 32)}


def test_unlike_workers_are_balanced_all_the_same():
    """Within a second: 1 to 2 ms a sample in steps of some 6 ms."""
    slope_s = np.array([5e-5, 1e-4, 2e-4])
    times = AffineTime(np.full(3, 1e-3), slope_s)
    best_s = times.seconds(allocate(times, Cluster(3, 96))).max()

    sizes, _ = run(Auto(), 1e-3, slope_s, np.ones((150, 3)))

    assert times.seconds(np.array(sizes[-1])).max() <= 1.05 * best_s


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize(
    "policy", [Auto(), Equal(), Every(Auto(), 7)], ids=["auto", "equal", "every"]
)
def test_nothing_changes_before_the_step_that_is_due(policy, noise):
    """Whatever the steps are like."""
    factors = NOISES[noise](np.random.default_rng(0)) * np.repeat([[1, 1, 1], [1, 3, 1]], 300, 0)

    sizes, holds = run(policy, 1e-3, np.array([5e-5, 1e-4, 2e-4]), factors)

    due = -1
    for step, hold in enumerate(holds):
        if step < due:
            assert sizes[step + 1] == sizes[step]
        else:
            due = step + hold
    assert sum(hold > 1 for hold in holds) > len(holds) / 2


def test_a_long_step_is_decided_on_by_itself():
    """With nothing to wait for, the third plan knows the speeds: the first step warms up."""
    sizes, holds = run(Auto(), 0.0, np.array([5e-4, 1e-3, 2e-3]), np.ones((2, 3)))

    assert sizes == [(32, 32, 32), (32, 32, 32), (55, 27, 14)]
    assert holds == [1, 1]


@pytest.mark.parametrize("policy", [LbBsp2020(), Every(LbBsp2020(), 1)], ids=lambda one: one.name)
def test_published_rules_see_each_step(policy):
    """As they were published, also in a wrapper."""
    _, holds = run(policy, 0.0, np.array([5e-5, 1e-4, 2e-4]), np.ones((20, 3)))

    assert holds == [1] * 20


def test_steps_count_for_policies_that_count_them():
    """Every seventh step is one of seven, however many are taken together."""
    factors = np.ones((70, 3))
    slope_s = np.array([5e-5, 1e-4, 2e-4])

    sizes, _ = run(Every(Auto(), 21), 0.0, slope_s, factors, warm_up_steps=0)

    changes = [step for step in range(1, 71) if sizes[step] != sizes[step - 1]]
    assert changes
    assert changes[0] in range(21, 42)


def test_plans_follow_speeds_also_where_claims_change_the_sizes_of_each_step():
    """Of 5 ms; who was slow got less by claims, and the equal plan would stay for good."""
    rng = np.random.default_rng(0)
    switch = ClaimSwitch(Hybrid(), adaptive=False)
    planner = Planner(Auto(), Job(2, 64, cuts=True), claims=switch)
    for step in range(200):
        moved = int(rng.integers(-3, 4))
        sizes = np.array([52 + moved, 12 - moved])
        reports = [
            Report(step, size, 64, seconds, 0.0)
            for size, seconds in zip(sizes.tolist(), sizes * [1e-4, 4e-4], strict=True)
        ]
        plan = planner.plan
        planner.observe(reports, next_step=step + 1)
        planner.account(reports, plan)
        planner.catch_up(next_step=step + 2)

    assert planner.plan.batch_size[0] in range(49, 54)
    assert planner.learnt()["times"]["num_steps"].min() > 5


def test_what_a_worker_without_samples_took_means_nothing():
    """Not for how many short steps are taken together either."""
    planner = Planner(Equal(), Job(3, 96, bounds=Bounds(min=0)), warm_up_steps=0)
    for step in range(4):
        shown = timings([48, 48, 0], np.array([0.002, 0.001, np.nan]))
        outcome = planner.observe_timings(step, shown, next_step=step + 1)

    assert outcome.events == ()
