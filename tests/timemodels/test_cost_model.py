"""What a sample costs is learnt from the times of steps, and told from the speed of its worker."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.solve import WorkerCosts, partition
from evenstep.timemodels import CostEstimator
from evenstep.timemodels._cost_model import CostModel, fit_costs

from .._tiers import slow_but

SPEED = np.array([1.0, 1.0, 2.0, 4.0])


def lengths(rng, num_samples, spread=0.8):
    """Samples as in fine-tuning, with the features L and L**2."""
    length = np.clip(np.exp(rng.normal(5.5, spread, num_samples)), 1, 8192).astype(np.int64)
    return np.stack([length, length**2], 1)


def is_useful(estimator):
    """Whether features predict better than counts do."""
    return estimator.error < 0.9 * estimator.error_by_count


def dealt(features, owner, num_ranks):
    """Features and counts of every rank."""
    work = np.stack([features[owner == rank].sum(axis=0) for rank in range(num_ranks)])
    return work, np.bincount(owner, minlength=num_ranks)


def observed(true, num_steps, rng, *, noise=0.0, slow=0.0, balanced=False):
    """An estimator after some steps of 32 samples, dealt evenly or by what it has learnt."""
    estimator = CostEstimator.fresh(num_features=2, kinds=[0] * 4)
    for _ in range(num_steps):
        features = lengths(rng, 32)
        owner = np.arange(32) // 8
        if balanced and estimator.model is not None:
            costs = WorkerCosts.rounded(estimator.model, features)
            owner = partition(features, costs).owner
        work, counts = dealt(features, owner, 4)
        seconds = true.seconds(work) * np.exp(noise * rng.normal(size=4))
        seconds *= np.where(rng.random(4) < slow, 3.0, 1.0)
        estimator = estimator.observe(work, counts, seconds)
    return estimator


def error_on_unseen_mixes(model, true, rng):
    """Median relative error on samples dealt at random, with longer tails than were seen."""
    return np.median(errors_on_unseen_mixes(model, true, rng))


def errors_on_unseen_mixes(model, true, rng):
    """Those of each rank, ``(50, 4)``."""
    work = [dealt(lengths(rng, 32, 1.2), rng.integers(0, 4, 32), 4)[0] for _ in range(50)]
    return np.stack([abs(model.seconds(one) / true.seconds(one) - 1) for one in work])


def steps_as_planned(true, num_steps, rng, *, estimator=None, noise=0.03):
    """Each step's estimator and true seconds, where plans go by features while those are useful."""
    estimator = estimator or CostEstimator.fresh(num_features=2, kinds=[0] * 4)
    for _ in range(num_steps):
        features = lengths(rng, 32)
        owner = np.arange(32) // 8
        if estimator.model is not None:
            judged = estimator.num_steps >= 32 and not is_useful(estimator)
            table = np.ones((32, 1), np.int64) if judged else features
            model = estimator.by_count if judged else estimator.model
            owner = partition(table, WorkerCosts.rounded(model, table)).owner
        work, counts = dealt(features, owner, 4)
        seconds = true(work, counts)
        estimator = estimator.observe(work, counts, seconds * np.exp(noise * rng.normal(size=4)))
        yield estimator, seconds


@pytest.mark.parametrize(
    ("linear", "quadratic"), [(1e-5, 0.0), (1e-5, 1e-9), (1e-5, 1e-8), (0.0, 1e-8)]
)
@pytest.mark.parametrize("balanced", [False, True])
def test_twenty_steps_tell_what_unseen_mixes_take(linear, quadratic, balanced):
    """Within 3 % under 3 % noise and a tenth of slow steps, while all end together as well."""
    shared = np.array([linear, quadratic])
    true = CostModel(np.full(4, 0.01), shared / SPEED[:, None])
    rng = np.random.default_rng(0)
    model = observed(true, 20, rng, noise=0.03, slow=0.1, balanced=balanced).model

    assert error_on_unseen_mixes(model, true, rng) <= 0.03


def test_without_noise_the_model_is_found():
    """To a part in a thousand, intercepts included."""
    true = CostModel(np.array([0.01, 0.02, 0.0, 0.005]), np.array([1e-5, 1e-8]) / SPEED[:, None])
    model = observed(true, 40, np.random.default_rng(1)).model

    np.testing.assert_allclose(model.slope_s, true.slope_s, rtol=0.02)
    assert error_on_unseen_mixes(model, true, np.random.default_rng(2)) <= 1e-3


def test_kinds_of_devices_have_features_of_their_own():
    """One kind pays for L alone, the other for L**2 alone."""
    true = CostModel(np.zeros(4), np.array([[1e-5, 0], [2e-5, 0], [0, 1e-8], [0, 2e-8]]))
    rng = np.random.default_rng(3)
    work = rng.uniform(1, 100, (20, 4, 2)) * [100, 10000]
    seconds = np.stack([true.seconds(one) for one in work])

    np.testing.assert_allclose(
        fit_costs(work, seconds, [0, 0, 1, 1]).slope_s, true.slope_s, rtol=1e-3, atol=1e-12
    )


def test_features_that_predict_nothing_are_noticed():
    """Every sample takes the same time: counts do as well, and better under noise."""
    estimator, rng = CostEstimator.fresh(num_features=2, kinds=[0] * 4), np.random.default_rng(4)
    for _ in range(40):
        work, counts = dealt(lengths(rng, 64), np.repeat(np.arange(4), [10, 10, 15, 29]), 4)
        seconds = (0.01 + 1e-3 * counts / SPEED) * np.exp(0.02 * rng.normal(size=4))
        estimator = estimator.observe(work, counts, seconds)

    assert not is_useful(estimator)


def test_features_that_predict_are_used_although_all_ranks_end_together():
    """Their times are alike then, which explains nothing: what counts is what is predicted."""
    true = CostModel(np.full(4, 0.01), np.array([1e-5, 1e-8]) / SPEED[:, None])
    estimator = observed(true, 40, np.random.default_rng(5), noise=0.03, balanced=True)

    assert is_useful(estimator)
    assert estimator.error < 0.06 < estimator.error_by_count


@pytest.mark.parametrize(
    ("noise", "seed"), slow_but([(0.03, 1), (0.1, 0)], product([0.03, 0.1], range(3)))
)
def test_a_rank_that_becomes_slower_is_followed_within_twenty_steps(noise, seed):
    """After 500 balanced steps, on mixes never seen; and features are useful throughout."""
    rng, shared = np.random.default_rng(seed), np.array([1e-5, 1e-9])
    before = CostModel(np.full(4, 0.01), shared / SPEED[:, None])
    after = CostModel(np.full(4, 0.01), shared / (SPEED / [1, 2, 1, 1])[:, None])
    run = list(steps_as_planned(lambda work, _: before.seconds(work), 500, rng, noise=noise))
    old = run[-1][0]
    slow = steps_as_planned(
        lambda work, _: after.seconds(work), 100, rng, estimator=old, noise=noise
    )
    run += list(slow)

    at_once = np.median(errors_on_unseen_mixes(old.model, after, rng), axis=0)
    errors = np.median(errors_on_unseen_mixes(run[519][0].model, after, rng), axis=0)
    assert at_once[1] > 0.25  # else there was nothing to follow
    assert errors.max() <= 0.1
    ends = np.array([seconds.max() / seconds.mean() for _, seconds in run[520:]])
    assert ends.mean() <= 1.01 + noise / 3
    assert all(is_useful(estimator) for estimator, _ in run[32:])


def test_a_noise_that_lingers_is_not_followed_as_a_change_of_speed():
    """A noise of 5 % that half a dozen steps share: earlier times stay as they were measured."""
    rng = np.random.default_rng(7)
    true = CostModel(np.full(4, 0.01), np.array([1e-5, 1e-9]) / SPEED[:, None])
    estimator, level = CostEstimator.fresh(num_features=2, kinds=[0] * 4), np.zeros(4)
    took = []
    for _ in range(64):
        work, counts = dealt(lengths(rng, 32), np.arange(32) // 8, 4)
        level = 0.8 * level + 0.03 * rng.normal(size=4)
        took.append(true.seconds(work) * np.exp(level))
        estimator = estimator.observe(work, counts, took[-1])

    np.testing.assert_array_equal(estimator.seconds, took)


def test_useful_features_are_known_to_be_so_by_step_twenty():
    """However wrong the predictions of the first steps were, in any of twenty runs."""
    true = CostModel(np.full(4, 0.01), np.array([1e-5, 1e-9]) / SPEED[:, None])
    runs = (
        steps_as_planned(lambda work, _: true.seconds(work), 20, np.random.default_rng(seed))
        for seed in range(20)
    )

    assert all(is_useful(list(run)[-1][0]) for run in runs)


def test_features_that_cost_nothing_are_noticed_where_plans_follow_them():
    """Every sample takes the same time, and plans went by lengths until that was known."""
    run = steps_as_planned(
        lambda _, counts: 0.01 + 1e-3 * counts / SPEED, 200, np.random.default_rng(8)
    )

    assert not any(is_useful(estimator) for estimator, _ in list(run)[32:])


@given(st.integers(0, 3), st.integers(1, 8))
def test_unknown_times_change_nothing(rank, num_steps):
    """A rank that was not measured in a step is left out of that step."""
    rng = np.random.default_rng(num_steps)
    true = CostModel(np.full(4, 0.01), np.array([1e-5, 1e-8]) / SPEED[:, None])
    work = np.stack([dealt(lengths(rng, 32), np.arange(32) // 8, 4)[0] for _ in range(9)])
    seconds = np.stack([true.seconds(one) for one in work])
    seconds[num_steps - 1, rank] = np.nan
    model = fit_costs(work, seconds, [0] * 4)

    np.testing.assert_allclose(model.seconds(work[0]), true.seconds(work[0]), rtol=0.01)


def test_no_model_is_made_of_nothing():
    """A rank without a known time has none, and what has no shape is refused."""
    estimator = CostEstimator.fresh(num_features=1, kinds=[0, 0])
    estimator = estimator.observe([[1], [2]], [1, 1], [0.1, np.nan])

    assert estimator.model is None
    assert not is_useful(estimator)
    with pytest.raises(ValueError, match="have the shapes"):
        estimator.observe([1, 2], [1, 1], [0.1, 0.2])
    with pytest.raises(ValueError, match="got 0 on rank 1"):
        fit_costs([[[1], [2]]], [[0.1, np.nan]], [0, 0])
    with pytest.raises(ValueError, match=r"in \[1, 8\]"):
        CostEstimator.fresh(num_features=0, kinds=[0])
    with pytest.raises(ValueError, match="at least 2"):
        CostEstimator.fresh(num_features=1, kinds=[0], window=1)


def test_rounded_costs_assign_as_the_seconds_do():
    """Integers as fine as 64 bits allow: loads in seconds are within a part in a million."""
    rng = np.random.default_rng(6)
    model = CostModel(np.full(4, 0.01), np.array([1e-5, 1e-8]) / SPEED[:, None])
    features = lengths(rng, 256)
    costs = WorkerCosts.rounded(model, features)
    found = partition(features, costs)
    work, _ = dealt(features, found.owner, 4)
    scale = found.load / model.seconds(work)

    np.testing.assert_allclose(scale, scale[0], rtol=1e-6)


def together(estimator, speed, rng, *, pauses=0.0):
    """The estimator after ten short steps at once."""
    work = rng.integers(50, 150, (10, 2, 1)).astype(float)
    seconds = work[..., 0] / speed * np.exp(0.05 * rng.normal(size=(10, 2)))
    seconds *= np.where(rng.random((10, 2)) < pauses, 20, 1)
    return estimator.observe(work, np.ones((10, 2)), seconds)


def test_short_steps_taken_together_are_all_remembered():
    """More of them than of long ones, up to 512; pauses in some leave little trace."""
    rng, estimator = np.random.default_rng(0), CostEstimator.fresh(num_features=1, kinds=[0, 0])
    for _ in range(60):
        estimator = together(estimator, np.array([2.0, 1.0]), rng, pauses=0.03)

    assert (estimator.num_steps, len(estimator.seconds)) == (60, 512)
    assert estimator.model.seconds([[100.0], [100.0]]) == pytest.approx([50, 100], rel=0.05)


def test_a_change_of_speed_is_seen_in_short_steps_with_pauses():
    """Half of the speed, from nearly all of the ten steps that were taken together."""
    rng, estimator = np.random.default_rng(1), CostEstimator.fresh(num_features=1, kinds=[0, 0])
    for number in range(12):
        speed = np.array([1.0, 1.0 if number < 10 else 2.0])
        estimator = together(estimator, speed, rng, pauses=0.03)

    assert estimator.model.seconds([[100.0], [100.0]]) == pytest.approx([100, 50], rel=0.1)


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_uncertainty_is_what_is_left_of_the_noise(noise):
    """About its share of a root of the steps; certain of nothing before the first."""
    true = CostModel(np.full(4, 0.1), np.tile([1e-4, 1e-8], (4, 1)))
    fresh = CostEstimator.fresh(num_features=2, kinds=[0] * 4)
    found = observed(true, 64, np.random.default_rng(0), noise=noise).uncertainty()

    assert fresh.uncertainty().tolist() == [1.0] * 4
    assert found == pytest.approx(noise * np.sqrt(2 / 62), rel=0.5, abs=2e-3)
