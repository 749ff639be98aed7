"""Facts special to `Dbs`."""

import numpy as np
import pytest

from evenstep import Cluster
from evenstep._planner import Job, Planner, Report
from evenstep.policies import Dbs

from .simulated import follow, measured, sizes_of

TRIO = Cluster(3, 96)
SLOPE_S = np.array([1.0, 2.0, 4.0]) * 1e-3


def test_sizes_change_at_the_end_of_an_epoch_only():
    """Three steps alike, then all at once to what the times ask for."""
    sizes = sizes_of(follow(Dbs(num_steps=3), TRIO, 0.0, [SLOPE_S] * 7)).tolist()

    assert sizes[:3] == [[32, 32, 32]] * 3
    assert sizes[3:] == [[55, 27, 14]] * 5


def test_a_fixed_cost_leaves_its_share_of_the_error():
    """Half of every step: after each epoch half of the way to equal times is left."""
    cluster = Cluster(2, 20_000)
    slope_s = np.array([1.0, 1.1]) * 1e-4
    intercept_s = 1.0

    sizes = sizes_of(follow(Dbs(num_steps=1), cluster, intercept_s, [slope_s] * 6))
    times = intercept_s + slope_s * sizes
    spread = np.ptp(times, axis=1)

    np.testing.assert_allclose(spread[1:6] / spread[:5], 0.5, atol=0.05)


def test_one_slow_step_counts_by_its_share_of_the_epoch():
    """Three times as long in one step of fifty: 4 % slower, not three times."""
    factors = np.ones((50, 2))
    factors[20, 1] = 3.0

    sizes = sizes_of(follow(Dbs(50), Cluster(2, 2040), 0.0, [np.ones(2)] * 50, factors=factors))

    assert sizes[-1].tolist() == [1040, 1000]


def test_an_epoch_counts_as_a_whole():
    """Its samples over its seconds, also where a step was short or another's sizes were kept."""
    policy = Dbs(num_steps=3)
    decision = policy.init(TRIO)
    for ran in ([60, 30, 6], [32, 32, 32], [1, 1, 2]):
        fixed_s = 0.02 * (np.array(ran) < 10)
        timings = measured(ran, SLOPE_S * ran + fixed_s)
        decision = policy.update(TRIO, timings, decision.state)

    speed = np.array([93, 63, 40]) / (SLOPE_S * [93, 63, 40] + 0.02 * np.array([1, 1, 2]))
    assert abs(decision.batch_size - 96 * speed / speed.sum()).max() < 1


@pytest.mark.parametrize("seed", range(5))
def test_sizes_add_up_whatever_the_remainders(seed):
    """The paper's code misses the global batch in one draw of four."""
    rng, cluster = np.random.default_rng(seed), Cluster(7, 100)
    for _ in range(100):
        decision = follow(Dbs(num_steps=1), cluster, 0.0, [rng.uniform(0.5, 2, 7)])[-1]

        assert decision.batch_size.sum() == 100


def test_a_worker_idle_for_an_epoch_keeps_its_speed():
    """As a wrapper may have it; one that never had samples counts as the mean of the others."""
    policy, cluster = Dbs(num_steps=1), Cluster(3, 90, min_batch_size=0)
    first = policy.init(cluster)

    never = policy.update(cluster, measured([60, 30, 0], [1.0, 1.0, np.nan]), first.state)
    known = policy.update(cluster, measured([60, 15, 15], [1.0, 0.5, 1.0]), never.state)
    idle = policy.update(cluster, measured([60, 30, 0], [1.0, 1.0, np.nan]), known.state)

    assert never.batch_size.tolist() == [40, 20, 30]
    assert idle.batch_size.tolist() == known.batch_size.tolist() == [51, 26, 13]


def test_settings_out_of_range_are_named():
    """The message names class and argument."""
    with pytest.raises(
        ValueError, match=r"`Dbs\(num_steps=...\)` must be at least 1, got 0.*less a short"
    ):
        Dbs(num_steps=0)


def test_an_epoch_is_as_long_as_its_full_steps():
    """The short last one is not shown to a policy, so sizes change once in each four steps."""
    planner, sizes = Planner(Dbs(num_steps=3), Job(2, 60, tail_size=7), warm_up_steps=0), []
    for step in range(16):
        plan = planner.plan
        now = plan.tail if step % 4 == 3 else plan.batch_size
        slope_s = (0.01, 0.02) if step // 4 % 2 else (0.02, 0.01)
        reports = [
            Report(step, size, sum(now), size * each_s, 0.0)
            for size, each_s in zip(now, slope_s, strict=True)
        ]
        planner.observe(reports, next_step=step + 1)
        sizes.append(plan.batch_size)

    changes = [step for step in range(1, 16) if sizes[step] != sizes[step - 1]]
    assert changes == [3, 7, 11, 15]
