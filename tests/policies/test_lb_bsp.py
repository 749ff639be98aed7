"""Facts special to the two rules of LB-BSP."""

from itertools import pairwise

import numpy as np
import pytest

from evenstep import AffineTime, Cluster, StepTimings, allocate
from evenstep.policies import LbBsp2018, LbBsp2020
from evenstep.prediction import Ema, Narx
from tests.prediction.simulated import series

from .._tiers import slow_but
from ..tables import TableTime
from .simulated import FOUR_GPUS, above_best, follow, jitter, measured, sizes_of, steps_until

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


FOUR = Cluster(4, 512)


def moves_and_end(delta):
    """Return moves at full ``delta`` on the paper's GPUs, and the sizes they end at."""
    decisions = follow(LbBsp2020(delta=delta), FOUR, 0.0, [FOUR_GPUS] * 500)
    num_moves = 0
    for before, after in pairwise(decisions):
        if after.state["delta"] != delta:
            return num_moves, before.batch_size
        num_moves += before.batch_size.tolist() != after.batch_size.tolist()
    return num_moves, decisions[-1].batch_size


@pytest.mark.parametrize(("delta", "num_moves"), [(1, 93), (5, 19), (16, 6)])
def test_the_four_gpus_of_lbb_take_as_many_moves_as_counted(delta, num_moves):
    """Until balanced within the dead-band, or until the first oscillation."""
    assert moves_and_end(delta)[0] == num_moves


def test_large_moves_stall_until_they_are_halved():
    """At 16 samples a move the four GPUs stop at 8 % imbalance; smaller ones go on."""
    stalled_s = FOUR_GPUS * moves_and_end(16)[1]
    settled_s = FOUR_GPUS * follow(LbBsp2020(delta=16), FOUR, 0.0, [FOUR_GPUS] * 500)[-1].batch_size

    assert np.ptp(stalled_s) / stalled_s.mean() == pytest.approx(0.08, abs=0.005)
    assert np.ptp(settled_s) / settled_s.mean() < 0.05


def test_a_move_takes_a_window_and_keeps_the_sum():
    """Five steps of the same sizes, then five samples from the slowest to the fastest."""
    slope_s = np.array([1.0, 1.1, 1.2, 2.0]) * 1e-3

    sizes = sizes_of(follow(LbBsp2020(), FOUR, 0.0, [slope_s] * 6))

    assert (sizes[:5] == 128).all()
    assert sizes[5].tolist() == sizes[6].tolist() == [133, 128, 128, 123]


def test_jitter_moves_little_because_a_window_is_averaged():
    """Equal workers with 4 % on every step: windows of one step would move six times as often."""
    noise = jitter(0.04, 500, 4, seed=0)

    def num_moves(policy):
        sizes = sizes_of(follow(policy, FOUR, 0.0, [np.full(4, 1e-3)] * 500, factors=noise))
        return np.count_nonzero(np.diff(sizes, axis=0).any(axis=1))

    assert num_moves(LbBsp2020()) * 5 <= num_moves(LbBsp2020(window=1))


def test_a_leader_without_memory_to_spare_is_passed_over():
    """The second fastest takes the samples, and a move is cut where less than delta fits."""
    cluster = Cluster(3, 96, max_batch_size=np.array([32, 34, 96]))
    slope_s = np.array([1.0, 1.1, 4.0]) * 1e-3

    sizes = sizes_of(follow(LbBsp2020(window=1), cluster, 0.0, [slope_s] * 5))

    assert sizes[1].tolist() == [32, 34, 30]
    assert (sizes[1:] == sizes[1]).all()


@pytest.mark.parametrize("global_batch_size", [512, 10_000, 1_000_000])
def test_a_share_of_the_batch_is_as_fast_at_any_batch(global_batch_size):
    """As many moves to balance, where so many samples would take ever more."""
    cluster = Cluster(4, global_batch_size)
    sizes = sizes_of(follow(LbBsp2020(delta=0.04), cluster, 0.0, [FOUR_GPUS] * 300))
    above = above_best(sizes, cluster, 0.0, FOUR_GPUS)

    assert steps_until(above, 0.05) == pytest.approx(19 * 5, abs=10)
    assert (abs(np.diff(sizes[:, 3])).max()) == round(0.04 * global_batch_size / 4)


def test_few_samples_a_move_get_nowhere_in_a_huge_batch():
    """The rule moves as many samples whatever the batch: its documentation says so."""
    cluster = Cluster(4, 1_000_000)
    sizes = sizes_of(follow(LbBsp2020(), cluster, 0.0, [FOUR_GPUS] * 300))

    assert sizes[-1, 3] == 250_000 - 5 * 60


def test_oscillation_halves_the_moves_and_doubles_the_window():
    """Moves of 40 swing past the balance; after the first, 20 a move and ten steps a window."""
    cluster, slope_s = Cluster(2, 128), np.array([1.0, 1.6]) * 1e-3

    decisions = follow(LbBsp2020(delta=40), cluster, 0.0, [slope_s] * 5)

    assert decisions[-1].state["delta"] == 20
    assert decisions[-1].state["window"] == 10


@pytest.mark.parametrize("rank", [0, 3])
def test_a_lasting_change_re_arms_what_oscillation_had_shrunk(rank):
    """Settled at one sample a move and long windows, it still answers a 2x change."""
    policy = LbBsp2020(delta=16)
    settled = follow(policy, FOUR, 0.0, [FOUR_GPUS] * 500)[-1]
    changed = FOUR_GPUS.copy()
    changed[rank] *= 2

    decisions = follow(policy, FOUR, 0.0, [changed] * 200, start=settled)
    above = above_best(sizes_of(decisions), FOUR, 0.0, changed)

    assert settled.state["delta"] < 16
    assert steps_until(above, 0.10) is not None
    assert steps_until(above, 0.10) <= 60


@pytest.mark.parametrize(
    "settings",
    [
        {"delta": 0},
        {"delta": 1.5},
        {"delta": -0.1},
        {"delta": float("inf")},
        {"window": 0},
        {"dead_band": -0.1},
    ],
    ids=str,
)
def test_settings_out_of_range_are_named(settings):
    """The message names class and argument."""
    with pytest.raises(ValueError, match=rf"`LbBsp2020\({next(iter(settings))}=...\)` must be"):
        LbBsp2020(**settings)
