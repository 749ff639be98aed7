"""Facts special to `LbBsp2018`."""

import numpy as np
import pytest

from evenstep import AffineTime, Cluster, StepTimings, allocate
from evenstep.policies import LbBsp2018
from evenstep.prediction import Ema, Narx
from evenstep.timemodels import TableTime
from tests.prediction.simulated import series

from .._tiers import slow_but
from .simulated import measured

TRIO = Cluster(3, 96)


def told(sizes, compute_s, resources):
    """Return the timings of a step, with what is free after it."""
    return StepTimings(sizes, compute_s, np.zeros(len(sizes)), resources)


def run(policy, given, cluster):
    """Return the seconds of every step of workers with speeds as given, and of the best split."""
    decision, step_s, best_s = policy.init(cluster), [], []
    for step, speed in enumerate(given.values[:-1]):
        sizes = decision.batch_size
        step_s.append((sizes / speed).max())
        best_s.append(cluster.global_batch_size / speed.sum())
        timings = told(sizes, sizes / speed, given.resources(step))
        decision = policy.update(cluster, timings, decision.state)
    return np.array(step_s), np.array(best_s)


def test_sizes_follow_the_foreseen_speeds():
    """30, 40 and 50 samples/s share 96 samples in that proportion."""
    policy = LbBsp2018(predictor=Ema(1.0))
    first = policy.init(TRIO)

    decision = policy.update(TRIO, measured([32, 32, 32], [32 / 30, 32 / 40, 32 / 50]), first.state)

    assert first.batch_size.tolist() == [32, 32, 32]
    assert decision.batch_size.tolist() == [24, 32, 40]
    assert "ema" in decision.reason


@pytest.mark.parametrize("seed", slow_but([2], range(3)))
def test_what_resources_foretell_is_planned_for_in_time(seed):
    """Neighbours come and go: within 12 % of the best, where the average ends 40 % above."""
    given, cluster = series("neighbours", seed), Cluster(8, 4096)
    above = {}
    for predictor in (Narx(), Ema()):
        step_s, best_s = run(LbBsp2018(predictor=predictor), given, cluster)
        above[predictor.name] = step_s[200:].mean() / best_s[200:].mean() - 1

    assert above["narx"] <= 0.12
    assert above["ema"] >= 0.4


def test_a_short_last_step_is_no_measurement():
    """With fixed costs everybody looks slow there; the speeds known before still hold."""
    policy = LbBsp2018(predictor=Ema(1.0))
    decision = policy.update(TRIO, measured([32, 32, 32], [1.0, 1.0, 2.0]), policy.init(TRIO).state)
    after = policy.update(TRIO, measured([2, 2, 1], [0.1, 0.5, 0.1]), decision.state)
    early = policy.update(TRIO, measured([2, 2, 1], [0.1, 0.5, 0.1]), policy.init(TRIO).state)

    assert after.batch_size.tolist() == decision.batch_size.tolist()
    assert early.batch_size.tolist() == [32, 32, 32]


def test_a_worker_never_measured_counts_as_the_mean():
    """And so is measured next."""
    cluster = Cluster(3, 96, min_batch_size=0)
    policy = LbBsp2018(predictor=Ema(1.0))

    timings = measured([64, 32, 0], [1.0, 1.0, np.nan])
    decision = policy.update(cluster, timings, policy.init(cluster).state)

    assert decision.batch_size.tolist() == [43, 21, 32]


def test_the_slowest_is_never_dropped():
    """It could win nothing back, not being measured: one granule stays, where zero is allowed."""
    cluster = Cluster(3, 96, min_batch_size=0, granularity=4)
    policy = LbBsp2018(predictor=Ema(1.0))

    timings = measured([32, 32, 32], [0.1, 0.1, 100.0])
    decision = policy.update(cluster, timings, policy.init(cluster).state)

    assert decision.batch_size.tolist() == [48, 44, 4]


def test_a_profile_is_solved_exactly_and_for_good():
    """Flat up to saturation and a line past it; times measured later change nothing."""
    sizes = np.arange(97)
    flat_s, slope_s, saturated = np.array([[5, 8, 6], [1, 0.5, 2], [16, 8, 4]])[..., np.newaxis]
    table = (flat_s + slope_s * np.maximum(sizes - saturated, 0)) * (sizes > 0)
    profile = TableTime(1e-3 * table)
    policy = LbBsp2018(profile=profile)
    first = policy.init(TRIO)

    later = policy.update(TRIO, measured(first.batch_size, [1.0, 9.0, 1.0]), first.state)

    assert first.batch_size.tolist() == allocate(profile, TRIO).tolist()
    assert later.batch_size.tolist() == first.batch_size.tolist()
    assert np.ptp(profile.seconds(first.batch_size)) < 2e-3


def test_a_profile_knows_the_bounds_in_force():
    """They may tighten from one step to the next."""
    policy = LbBsp2018(profile=AffineTime(np.zeros(3), np.array([1.0, 2.0, 4.0])))
    tight = Cluster(3, 96, max_batch_size=40)

    first = policy.init(TRIO)
    decision = policy.update(tight, measured(first.batch_size, [1.0, 1.0, 1.0]), first.state)

    assert first.batch_size.max() > 40
    assert decision.batch_size.max() == 40


def test_a_profile_of_other_workers_is_refused():
    """At the start, with the number that would do."""
    policy = LbBsp2018(profile=AffineTime(np.zeros(2), np.ones(2)))

    with pytest.raises(ValueError, match=r"`LbBsp2018\(profile=...\)` must .* 3 workers, got 2"):
        policy.init(TRIO)
