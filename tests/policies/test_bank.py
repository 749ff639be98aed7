"""The bank of forecasts, and when auto goes back to the equal split."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import AffineTime, Cluster
from evenstep.policies import Auto
from evenstep.policies._auto import no_proof, proved, resize_cost_s, why_equal
from evenstep.policies._bank import Bank, level_splits
from evenstep.prediction import Ema, Seasonal

from .simulated import jitter, measured

PAIR = AffineTime(np.zeros(2), np.array([0.01, 0.02]))
COSTS = st.lists(st.floats(1e-4, 1e-1), min_size=1, max_size=7)


def by_bisection(intercept_s, slope_s, cluster):
    """Return the level split the dull way: what fits into a time, for ever better times."""
    low, high = 0.0, float((intercept_s + slope_s * cluster.global_batch_size).max()) + 1.0
    for _ in range(200):
        middle = (low + high) / 2
        fits = np.clip(
            (middle - intercept_s) / slope_s, cluster.min_batch_size, cluster.max_batch_size
        )
        low, high = (middle, high) if fits.sum() < cluster.global_batch_size else (low, middle)
    return fits


@given(costs=COSTS, data=st.data())
def test_a_level_split_is_what_fits_into_the_shortest_time(costs, data):
    """Within any bounds: against bisection over the time."""
    slope_s = np.array(costs)
    each = st.lists(st.integers(0, 40), min_size=len(costs), max_size=len(costs))
    lo = np.array(data.draw(each))
    hi = lo + np.array(data.draw(each))
    total = data.draw(st.integers(max(int(lo.sum()), 1), max(int(hi.sum()), 1)))
    if hi.sum() < 1:
        return
    cluster = Cluster(len(costs), total, min_batch_size=lo, max_batch_size=hi)
    intercept_s = np.array(data.draw(st.lists(st.floats(0, 0.5), min_size=7, max_size=7)))
    intercept_s = intercept_s[: len(costs)]

    (split,) = level_splits(intercept_s, slope_s[np.newaxis], cluster)

    assert split.sum() == pytest.approx(total)
    expected = by_bisection(intercept_s, slope_s, cluster)
    assert split == pytest.approx(expected, rel=1e-6, abs=1e-6 * total)


def test_many_forecasts_are_split_as_each_by_itself():
    """No forecast's bounds pin another's workers."""
    draw = np.random.default_rng(3)
    slopes_s, intercept_s = draw.uniform(1e-3, 1e-1, (20, 6)), draw.uniform(0, 0.2, 6)
    cluster = Cluster(6, 200, min_batch_size=5, max_batch_size=60)

    together = level_splits(intercept_s, slopes_s, cluster)

    for slope_s, split in zip(slopes_s, together, strict=True):
        (alone,) = level_splits(intercept_s, slope_s[np.newaxis], cluster)
        assert split == pytest.approx(alone)


def played(bank, costs, filtered, cluster):
    """Return each expert's weight after every step, and what all mixtures and experts lost.

    Of the mixtures the quick one, the calm one, and the one of both.
    """
    state, weights, lost, losses = bank.init(cluster), [], [], []
    for cost, slope_s in zip(costs, filtered, strict=True):
        best = level_splits(np.zeros(len(cost)), cost[np.newaxis], cluster)[0]
        parts = state["weights"] @ state["splits"]
        mixtures = np.vstack([parts, state["trust"] @ parts])
        lost.append((cost * mixtures).max(axis=1) / (cost * best).max() - 1)
        losses.append((cost * state["splits"]).max(axis=1) / (cost * best).max() - 1)
        times = AffineTime(np.zeros(len(cost)), slope_s)
        state = bank.update(state, cluster, times, cost, usual=cost)
        weights.append(state["trust"] @ state["weights"])
    return np.array(weights)[1:], np.array(lost)[1:], np.array(losses)[1:]  # foreseen ones


def load(num_steps, draw):
    """Return costs that are steady, then flip at every step, then are steady again."""
    costs = np.tile([1e-2, 2e-2, 1e-2, 4e-2], (num_steps, 1))
    third = num_steps // 3
    costs[third : 2 * third : 2] *= [1.0, 3.0, 1.0, 1.0]
    return costs * draw.lognormal(0, 0.02, costs.shape)


def test_who_foresees_best_is_followed_and_another_takes_over():
    """A filter that is always wrong loses to the last value at once; and back, as it is right."""
    costs = np.tile([1e-2, 2e-2, 4e-2], (120, 1))
    filtered = costs[:, ::-1].copy()
    filtered[60:] = costs[60:]
    swapped = costs.copy()
    swapped[60:] = costs[60:] * np.where(np.arange(60) % 2, 1.0, 3.0)[:, np.newaxis] ** [1, 0, 0]
    filtered[60:] = np.roll(swapped[60:], -1, axis=0)  # it alone knows what comes
    bank = Bank(experts=((Ema(1.0), 0.2), (Ema(0.1), 0.02)))

    weights, _, _ = played(bank, swapped, filtered, Cluster(3, 96))

    assert weights[10, 1] > 0.8
    assert weights[-1, 0] > 0.8


def test_the_mixture_costs_no_more_than_its_parts():
    """A makespan is convex in the sizes."""
    costs = load(90, np.random.default_rng(1000))
    bank = Bank()

    weights, lost, losses = played(bank, costs, np.roll(costs, 1, axis=0), Cluster(4, 128))

    assert (lost[1:, 2] <= (weights[:-1] * losses[1:]).sum(axis=1) + 1e-9).all()


def bound(best, num_steps, *, rate, share, least, num_changes):
    """Return what fixed share may lose in all, beside experts who lose ``best``."""
    odds = (num_changes + 1) * math.log(1 / (share * least)) - num_steps * math.log(1 - share)
    return best + rate * num_steps / 8 + odds / rate


@pytest.mark.parametrize("seed", range(1000, 1004))
def test_the_regret_is_within_its_bound(seed):
    """Against the best sequence of experts with two changes, found by looking back."""
    bank, draw = Bank(), np.random.default_rng(seed)
    costs = load(300, draw)
    _, lost, losses = played(bank, costs, np.roll(costs, 1, axis=0), Cluster(4, 128))
    clipped = np.clip(losses, 0, 1)
    best, third, num_steps = 0.0, 100, len(lost)
    for part in range(3):
        best += clipped[part * third : (part + 1) * third].sum(axis=0).min()

    least = bank._priors()[0].min()
    quick, calm, both = np.clip(lost, 0, 1).sum(axis=0)

    assert quick <= bound(best, num_steps, rate=8.0, share=0.01, least=least, num_changes=2)
    assert both <= bound(
        min(quick, calm), num_steps, rate=2.0, share=0.002, least=0.01, num_changes=0
    )
    assert both <= 1.5 * best + 3  # what it does in fact


def test_where_nothing_is_foreseeable_the_equal_split_is_found():
    """Workers slow down by chance, each by itself: quick weights chase whoever was lucky."""
    costs = 1e-2 * np.random.default_rng(1).lognormal(0.0, 1.0, (400, 6))
    averages = np.cumsum(costs, axis=0) / np.arange(1, 401)[:, np.newaxis]

    _, lost, losses = played(Bank(), costs, averages, Cluster(6, 384))

    quick, _, both = lost.mean(axis=0)
    equal = losses.mean(axis=0)[-1]
    assert both <= 1.03 * equal
    assert quick >= 1.05 * equal


def test_the_forecast_is_the_one_under_which_the_mixture_is_level():
    """So the exact solver finds the mixture again, in whole samples."""
    from evenstep import allocate

    costs, cluster = load(40, np.random.default_rng(5)), Cluster(4, 4096)
    bank, state = Bank(), Bank().init(cluster)
    times = AffineTime(np.full(4, 0.3), costs.mean(axis=0))
    for cost in costs:
        state = bank.update(state, cluster, times, cost, usual=cost)

    split = allocate(bank.forecast(state, times), cluster)

    mixture = state["trust"] @ state["weights"] @ state["splits"]
    assert abs(split - mixture).max() <= 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rate": 0.0}, r"Bank\(rate"),
        ({"equal": 0.0}, r"Bank\(equal"),
        ({"experts": ((Ema(1.0), 0.0),)}, r"Bank\(experts"),
        ({"share": 0.0}, r"Bank\(share"),
        ({"share": 1.0}, r"Bank\(share"),
        ({"rate": math.inf}, r"Bank\(rate=...\)` must be finite"),
        ({"equal": math.inf}, r"Bank\(equal=...\)` must be finite"),
        ({"experts": ((Ema(1.0), math.inf),)}, r"Bank\(experts=...\)` must be finite"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    """By name."""
    with pytest.raises(ValueError, match=message):
        Bank(**settings)


def test_a_period_is_the_clock_only_where_it_is_the_best_forecast():
    """In noise a period is found by chance now and then, and nobody should go by it."""
    wave = np.where(np.arange(120) // 10 % 2, 0.01, 0.02)
    costs, cluster = np.column_stack([wave, np.full(120, 0.02)]), Cluster(2, 64)
    bank = Bank(experts=((Ema(1.0), 0.2), (Seasonal(), 0.5)))
    state = bank.init(cluster)
    assert not bank.goes_by_the_clock(state)
    for cost in costs:
        times = AffineTime(np.zeros(2), cost)
        state = bank.update(state, cluster, times, cost, usual=cost)

    assert bank.experts[1][0].periods(state["experts"][1]).any()
    for best in range(4):  # the filter, the last value, the period, the equal split
        weights = np.tile(np.where(np.arange(4) == best, 0.4, 0.2), (2, 1))
        assert bank.goes_by_the_clock({**state, "weights": weights}) == (best == 2)


def test_the_excess_of_first_steps_is_averaged():
    """Three tenths of each; noise of a tenth is none; cheap ones let it decay."""
    sizes = [20, 10]
    slow, usual = measured(sizes, [1.2, 0.2]), measured(sizes, [0.21, 0.2])

    assert resize_cost_s(0.0, slow, PAIR) == pytest.approx(0.3)
    assert resize_cost_s(0.3, slow, PAIR) == pytest.approx(0.3 + 0.3 * 0.7)
    assert resize_cost_s(1.0, usual, PAIR) == pytest.approx(0.7)


def test_a_worker_without_samples_has_no_first_step():
    """Its time means nothing."""
    assert resize_cost_s(0.0, measured([20, 0], [0.2, np.nan]), PAIR) == 0


def padded_steps(num_steps, seed):
    """Return a run's seconds, and those of the equal split: padded texts of very unlike lengths.

    A worker's samples take as long as the longest of them: chance makes workers look unlike, and a
    large share is likely to have a long one.
    """
    rng, cluster = np.random.default_rng(seed), Cluster(4, 32)
    decision = equal = Auto().init(cluster)
    took = []
    for _ in range(num_steps):
        length = np.clip(rng.lognormal(5.5, 1.5, 32), 1, 16384)
        each_s = 1e-9 * (512 * length + length**2)
        compute_s, equal_s = (
            sizes * np.maximum.reduceat(each_s, np.cumsum(sizes) - sizes)
            for sizes in (decision.batch_size, equal.batch_size)
        )
        took.append((compute_s.max(), equal_s.max()))
        decision = Auto().update(cluster, measured(decision.batch_size, compute_s), decision.state)
    return np.array(took)


def test_what_costs_more_than_it_saves_is_given_up():
    """Where speeds are chance, the equal split is gone back to: without that, it is 40 % more."""
    runs = [padded_steps(150, seed)[45:].sum(axis=0) for seed in range(4)]
    took_s, equal_s = np.sum(runs, axis=0)

    assert took_s <= 1.2 * equal_s


def test_a_worker_that_turns_slow_while_sizes_stay_equal_is_followed():
    """After eight steps in which it was the slowest one."""
    equal, times = np.full(4, 8), AffineTime(np.zeros(4), np.full(4, 0.01))
    proof = no_proof()
    for _ in range(10):
        sizes = np.array([20, 4, 4, 4])
        proof = proved(proof, measured(sizes, np.array([0.9, 0.1, 0.1, 0.1])), times, equal)
    assert why_equal(proof)
    for step in range(8):
        assert why_equal(proof)
        seconds = np.array([0.1, 0.1, 0.3 - 0.001 * step, 0.1])
        proof = proved(proof, measured(equal, seconds), times, equal)

    assert not why_equal(proof)


def beside_a_cliff(jump, num_steps, *, grows_at=None):
    """Return a run's steps beside equal ones, and reasons: past 150 samples, any worker is slower.

    Workers are two times apart. From ``grows_at`` on, all times are six times as long.
    """
    cluster, decision, took_s, equal_s = Cluster(4, 512), Auto().init(Cluster(4, 512)), [], []
    reasons = set()
    noise = jitter(0.03, num_steps, 4, seed=2)
    for step in range(num_steps):
        each_s = np.array([1.0, 1.2, 1.6, 2.0]) * 1e-3 * noise[step]
        each_s *= 6.0 if grows_at is not None and step >= grows_at else 1.0
        sizes = decision.batch_size
        seconds = sizes * each_s * np.where(sizes > 150, jump, 1.0)
        took_s.append(seconds.max())
        equal_s.append((128 * each_s).max())
        decision = Auto().update(cluster, measured(sizes, seconds), decision.state)
        reasons.add(decision.reason)
    return np.array(took_s), np.array(equal_s), reasons


@pytest.mark.parametrize("jump", [3.0, 5.0])
def test_times_that_jump_at_a_size_are_left_for_the_equal_split(jump):
    """As where memory is swapped: no line tells it, and one worker is the slowest at all times."""
    took_s, equal_s, reasons = beside_a_cliff(jump, 200)

    assert took_s[:10].max() > 2 * equal_s.max()
    assert "equal: steps at other sizes took at least twice as long as equal ones" in reasons
    assert took_s.sum() <= 1.3 * equal_s.sum()
    assert took_s[100:].sum() <= 1.1 * equal_s[100:].sum()


def test_load_that_grows_on_all_workers_is_no_reason_to_stay_equal():
    """The equal split takes three readings to show that it has grown there, too."""
    took_s, equal_s, _ = beside_a_cliff(1.0, 100, grows_at=30)

    assert np.count_nonzero(took_s[1:] == equal_s[1:]) <= 3
    assert took_s[30:].sum() <= 0.8 * equal_s[30:].sum()
