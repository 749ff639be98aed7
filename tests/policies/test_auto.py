"""Facts special to `Auto`."""

import math
from itertools import pairwise, product

import numpy as np
import pytest

from evenstep import AffineTime, Cluster, StepTimings, allocate
from evenstep.policies import Auto

from .._tiers import slow_but
from .simulated import (
    above_best,
    follow,
    jitter,
    largest_change,
    measured,
    sizes_of,
    unlike_workers,
)

EIGHT = Cluster(8, 512)


@pytest.mark.parametrize("seed", range(10))
def test_the_third_plan_is_within_two_percent_of_the_best(seed):
    """Without noise: equal, by speeds, by speeds and fixed costs."""
    intercept_s, slope_s = unlike_workers(seed)

    sizes = sizes_of(follow(Auto(), EIGHT, intercept_s, [slope_s] * 2))

    assert above_best(sizes, EIGHT, intercept_s, slope_s)[2] <= 0.02


@pytest.mark.parametrize(
    ("world_size", "share"),
    slow_but([(2, 0.01), (32, 0.03)], product([2, 8, 32], [0.01, 0.03])),
)
def test_equal_workers_keep_the_equal_split_under_jitter(world_size, share):
    """Noise alone is no reason to leave it."""
    cluster, slopes_s = Cluster(world_size, 64 * world_size), [np.full(world_size, 0.001)] * 300
    noise = jitter(share, 300, world_size, seed=world_size)

    sizes = sizes_of(follow(Auto(), cluster, 0.005, slopes_s, factors=noise))

    assert (sizes == 64).all()


@pytest.mark.parametrize(
    ("compute_s", "sizes"),
    [
        ((0.5, 1.0), (43, 21)),
        ((0.1, 1.0), (56, 8)),  # by a factor of four at most
        ((0.6, 1.0), None),
        ((0.1, 0.3), None),
        ((0.5, 0.0), None),  # without samples
    ],
)
def test_a_guess_takes_a_factor_of_two_and_a_quarter_of_a_second(compute_s, sizes):
    """Warming up may take as much on one worker alone. Once there are times, none is needed."""
    cluster, auto = Cluster(2, 64, min_batch_size=0), Auto()
    start = auto.init(cluster)
    batch = np.array([32, 32] if compute_s[1] else [64, 0])
    timings = StepTimings(batch, np.array(compute_s), np.zeros(2))
    found = auto.guess(cluster, timings, start.state)

    assert (None if found is None else tuple(found.batch_size)) == sizes
    after = auto.update(cluster, timings, start.state)
    assert auto.guess(cluster, timings, after.state) is None


@pytest.mark.parametrize("seed", range(3))
def test_jitter_alone_moves_nobody_by_more_than_five_percent(seed):
    """Once it has settled, on unlike workers with 3 % on every step."""
    intercept_s, slope_s = unlike_workers(seed)
    noise = jitter(0.03, 300, 8, seed)

    decisions = follow(Auto(), EIGHT, intercept_s, [slope_s] * 300, factors=noise)

    assert largest_change(sizes_of(decisions)[100:]) <= 0.05


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
@pytest.mark.parametrize("rank", range(4))
def test_one_odd_step_changes_nothing(rank, factor):
    """Three times slower or faster for a single step: the next two plans stay as they were."""
    intercept_s, slope_s = unlike_workers(1)
    factors = jitter(0.02, 52, 8, seed=rank)
    factors[50, rank] *= factor

    sizes = sizes_of(follow(Auto(), EIGHT, intercept_s, [slope_s] * 52, factors=factors))

    assert largest_change(sizes[50:]) <= 0.05


@pytest.mark.parametrize("rank", range(4))
def test_a_lasting_change_is_followed_after_its_second_step(rank):
    """Twice as slow from now on: within 10 % of the best after two steps."""
    intercept_s, slope_s = unlike_workers(2)
    settled = follow(Auto(), EIGHT, intercept_s, [slope_s] * 50)[-1]
    changed = slope_s.copy()
    changed[rank] *= 2

    sizes = sizes_of(follow(Auto(), EIGHT, intercept_s, [changed] * 20, start=settled))

    assert (above_best(sizes, EIGHT, intercept_s, changed)[2:] <= 0.10).all()


def test_changes_that_proved_lasting_are_followed_at_once():
    """After three of them, the fourth takes one step instead of two."""
    intercept_s, slope_s = unlike_workers(3)
    slopes_s = np.repeat([slope_s * (1 + (np.arange(8) == rank)) for rank in range(4)], 40, axis=0)
    slopes_s = np.vstack([[slope_s] * 40, slopes_s])
    settled = follow(Auto(), EIGHT, intercept_s, slopes_s)[-1]
    changed = slope_s * (1 + (np.arange(8) == 5))

    sizes = sizes_of(follow(Auto(), EIGHT, intercept_s, [changed] * 2, start=settled))

    assert above_best(sizes, EIGHT, intercept_s, changed)[1] <= 0.10


def test_a_drift_under_a_balancer_is_no_fixed_cost():
    """A balancer keeps times level while sizes follow the speeds: that is no flat curve.

    Taken for one, the fast worker would be given nearly everything at some point.
    """
    steps = np.arange(400)[:, np.newaxis]
    intercept_s, slope_s = unlike_workers(1000)
    slopes_s = slope_s * (1 + 0.5 * np.sin(2 * np.pi * (steps / 200 + np.arange(8) / 8)))
    noise = jitter(0.02, 400, 8, seed=1)

    sizes = sizes_of(follow(Auto(), EIGHT, intercept_s, slopes_s, factors=noise))
    above = [
        above_best(sizes[step : step + 1], EIGHT, intercept_s, slopes_s[step])[0]
        for step in range(20, 400)
    ]

    assert np.mean(above) <= 0.05
    assert np.quantile(above, 0.99) <= 0.15
    assert np.max(above) <= 0.70  # a single step, before the line is right again


def test_savings_are_counted_against_the_split_in_force():
    """Once the large one is made, jitter offers no other worth 10 %."""
    intercept_s, slope_s = unlike_workers(4)
    noise = jitter(0.02, 100, 8, seed=4)

    policy = Auto(min_saving=0.1)
    sizes = sizes_of(follow(policy, EIGHT, intercept_s, [slope_s] * 100, factors=noise))

    assert (sizes[0] == 64).all()
    assert not (sizes[10] == 64).all()
    assert (sizes[10:] == sizes[10]).all()


def test_a_saving_below_the_least_is_left_alone():
    """`min_saving` of 50 % keeps the equal split where a third could be saved."""
    cluster, slopes_s = Cluster(2, 96), [np.array([0.01, 0.02])] * 10

    decision = follow(Auto(min_saving=0.5), cluster, 0.0, slopes_s)[-1]

    assert decision.batch_size.tolist() == [48, 48]
    assert decision.reason.startswith("held: no split would save 5")


def test_the_reason_says_what_is_saved_and_who_is_slow():
    """A person reading the log learns both."""
    decision = follow(Auto(), Cluster(2, 96), 0.0, [np.array([0.01, 0.02])])[-1]

    # 33.3 and 50, but for the equal split's part in the forecast.
    assert decision.reason == "saves 33.1%: rank 1 slowest at 50.1 samples/s"


def test_as_long_as_a_worker_was_never_measured_nothing_changes():
    """With fewer samples than workers, and zero allowed, the reason names the one left out."""
    cluster = Cluster(3, 2, min_batch_size=0)

    decision = follow(Auto(), cluster, 0.0, [np.array([0.01, 0.02, 0.03])] * 3)[-1]

    assert decision.batch_size.tolist() == [1, 1, 0]
    assert decision.reason == "held: rank 2 was given no samples so far"


@pytest.mark.parametrize("granularity", [1, 8])
@pytest.mark.parametrize("seed", range(3))
def test_a_split_is_held_exactly_as_long_as_the_best_would_not_pay(seed, granularity):
    """By the solver itself, which `update` calls only to make a change.

    A step that ended level makes none: the next one has to confirm it.
    """
    policy, cluster = Auto(), Cluster(8, 512, max_batch_size=120, granularity=granularity)
    intercept_s, slope_s = unlike_workers(seed)
    slopes_s = np.repeat([slope_s, slope_s[::-1], slope_s], 40, axis=0)
    noise = jitter(0.03, 120, 8, seed)

    decisions = follow(policy, cluster, intercept_s, slopes_s, factors=noise)
    settled, changes = decisions[2:], 0
    for before, after in pairwise(settled):
        fitted = policy.filter.times(after.state["filter"])
        times = policy.bank.forecast(after.state["bank"], fitted)
        best_s = times.seconds(allocate(times, cluster)).max()
        pays = 1 - best_s / times.seconds(before.batch_size).max() >= policy.min_saving
        changes += pays

        waits = after.reason.startswith("held: level")
        assert waits <= (pays and before.level > 0)
        assert (pays and not waits) == (not after.reason.startswith("held"))
        assert (pays and not waits) or after.batch_size is before.batch_size

    assert 2 <= changes <= 60


@pytest.mark.parametrize("min_saving", [-0.1, 1.0, float("nan")])
def test_a_least_saving_out_of_range_is_named(min_saving):
    """The message gives class and argument, rule, value and remedy."""
    with pytest.raises(ValueError, match=r"`Auto\(min_saving=...\)` must be in \[0, 1\), got"):
        Auto(min_saving=min_saving)


def test_a_far_away_size_is_approached_in_reaches():
    """A worker 100 times slower is not sent from 48 samples to 1 on the strength of one size."""
    decisions = follow(Auto(), Cluster(2, 96), 0.0, [np.array([0.01, 1.0])] * 6)

    assert sizes_of(decisions)[:, 1].tolist()[:4] == [48, 12, 3, 1]


def test_the_reach_is_a_factor():
    """The message gives class and argument, rule, value and remedy."""
    with pytest.raises(ValueError, match=r"`Auto\(reach=...\)` must be above 1, got 1\.0\. 4 is"):
        Auto(reach=1.0)


@pytest.mark.parametrize("reach", [1e30, math.inf])
def test_an_endless_reach_is_no_limit(reach):
    """Nor is one past what can be counted."""
    decisions = follow(Auto(reach=reach), Cluster(2, 96), 0.0, [np.array([0.01, 1.0])] * 2)

    assert sizes_of(decisions)[:, 1].tolist() == [48, 1, 1]


@pytest.mark.parametrize("noise_share", [0.0, 0.02])
@pytest.mark.parametrize("seed", range(4))
def test_one_slow_step_moves_nobody(seed, noise_share):
    """Three times as slow, once: no forecast of the bank makes the next plan another one."""
    intercept_s, slope_s = unlike_workers(seed)
    factors = jitter(noise_share, 61, 8, seed)
    factors[60, seed] *= 3

    before, after = sizes_of(follow(Auto(), EIGHT, intercept_s, [slope_s] * 61, factors=factors))[
        -2:
    ]

    assert (abs(after - before) <= 0.05 * before).all()


def test_what_is_level_grows_with_noise_up_to_a_tenth():
    """To equal workers, that much apart is no news; 1 % where there is no noise."""
    cluster, slopes_s = Cluster(2, 64), [np.array([0.01, 0.01])] * 200

    levels = [
        follow(Auto(), cluster, 0.0, slopes_s, factors=jitter(share, 200, 2, seed=1))[-1].level
        for share in (0.0, 0.01, 0.02, 0.2)
    ]

    assert levels[0] == pytest.approx(0.014, abs=0.002)  # the filter trusts no clock beyond 0.2 %
    assert levels[1] == pytest.approx(0.03, abs=0.008)
    assert levels[2] == pytest.approx(0.05, abs=0.012)
    assert levels[3] == 0.1


def test_a_change_within_the_noise_waits_for_one_more_step_at_most():
    """A step that ends level changes nothing by itself; the one after it decides, level or not."""
    noise = jitter(0.03, 1000, 2, seed=1)
    slopes_s = np.repeat([[0.01, 0.01], [0.01, 0.0106]] * 5, 100, axis=0)

    decisions = follow(Auto(), Cluster(2, 2000), 0.0, slopes_s, factors=noise)
    waiting = [n for n, each in enumerate(decisions) if each.reason.startswith("held: level")]

    assert waiting
    for n in waiting:
        assert decisions[n].level == 0
        assert n + 1 not in waiting


def test_where_load_goes_by_the_clock_every_step_is_news():
    """A flip that is foreseen comes after steps that were level."""
    wave = np.where(np.arange(200) // 15 % 2, 0.01, 0.02)
    slopes_s = np.column_stack([wave, np.full(200, 0.02)])

    decisions = follow(Auto(), Cluster(2, 64), 0.0, slopes_s)

    assert decisions[5].level > 0
    assert decisions[-1].level == 0


def test_a_worker_that_was_left_out_stays_out():
    """It is not measured any more, and would be the slowest of the equal split all the same."""
    cluster, intercept_s = Cluster(3, 96, min_batch_size=0), np.array([0.002, 0.002, 5.0])

    decisions = follow(Auto(), cluster, intercept_s, [np.array([0.001, 0.0012, 0.0014])] * 40)

    assert sizes_of(decisions)[4:].tolist() == [[52, 44, 0]] * 37


@pytest.mark.parametrize("step_s", [1e-4, 2e-3])
def test_what_short_steps_cannot_save_is_said_in_seconds(step_s):
    """A change has to save a millisecond, which is more than all of the one and half the other."""
    slopes_s = [np.array([1.0, 1.01]) * step_s / 48] * 5

    reason = follow(Auto(), Cluster(2, 96), 0.0, slopes_s)[-1].reason

    seconds = "steps of 0.0001 s cannot save the 0.001 s asked for"
    assert reason.endswith(seconds if step_s < 1e-3 else "no split would save 49.5%")


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
