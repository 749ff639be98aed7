"""What a change of sizes costs, and that `auto` changes less where it costs more."""

import numpy as np
import pytest

from evenstep import AffineTime, Cluster
from evenstep.policies import Auto

from .simulated import measured

PAIR = AffineTime(np.zeros(2), np.array([0.01, 0.02]))


def changes(first_step_s, num_steps=300):
    """How often `auto` changes sizes under drift, where each first step takes so much longer."""
    policy, cluster, rng = Auto(), Cluster(4, 256), np.random.default_rng(3)
    decision, former, count = policy.init(cluster), None, 0
    slope_s = np.array([0.01, 0.01, 0.02, 0.02])
    for _ in range(num_steps):
        slope_s = slope_s * np.exp(0.02 * rng.standard_normal(4))
        sizes = decision.batch_size
        is_new = former is not None and not np.array_equal(sizes, former)
        decision = policy.update(
            cluster, measured(sizes, slope_s * sizes + first_step_s * is_new), decision.state
        )
        count, former = count + is_new, sizes
    return count


def test_a_change_has_to_pay_for_what_it_costs():
    """Steps take a second; where a first one takes ten more, sizes change a third as often."""
    free, dear = changes(0.0), changes(10.0)

    assert free > 60
    assert 2 < dear < free / 3


def test_a_pause_that_passes_for_the_cost_of_a_change_is_outlived():
    """Two minutes in the first step after one, of steps of 0.1 s: speeds that turn are followed.

    Sizes that have stayed for long may stay as long again, and a change pays for itself in that.
    """
    policy, cluster, pauses = Auto(), Cluster(2, 128), [120.0]
    decision, slope_s = policy.init(cluster), np.array([0.001, 0.002])
    for step in range(1000):
        sizes = decision.batch_size
        seconds = (slope_s[::-1] if step >= 50 else slope_s) * sizes
        if sizes[0] != 64 and pauses:
            seconds += pauses.pop()
        decision = policy.update(cluster, measured(sizes, seconds), decision.state)

    assert decision.state["resize_s"] > 0.5
    assert abs(decision.batch_size - [43, 85]).max() <= 1


@pytest.mark.parametrize("horizon", [0, -1, float("nan")])
def test_a_horizon_out_of_range_is_named(horizon):
    """The message gives class and argument, rule, value and remedy."""
    with pytest.raises(ValueError, match=r"Auto\(horizon=...\)` must be at least 1, got"):
        Auto(horizon=horizon)


def test_what_a_change_costs_stays_known_beside_a_worker_left_out():
    """Nothing changed in these steps, whatever the last size of the third worker was."""
    policy, cluster = Auto(), Cluster(3, 30, min_batch_size=0)
    decision = policy.init(cluster)
    decision = policy.update(cluster, measured([10, 10, 10], [0.1, 0.1, 0.1]), decision.state)
    state = {**decision.state, "resize_s": 5.0}
    costs = []
    for _ in range(3):
        state = policy.update(cluster, measured([15, 15, 0], [0.15, 0.15, np.nan]), state).state
        costs.append(state["resize_s"])

    assert costs == [pytest.approx(3.5)] * 3
