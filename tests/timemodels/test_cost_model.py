"""What a sample costs is learnt from the times of steps, and told from the speed of its worker."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.solve import WorkerCosts, partition
from evenstep.timemodels import CostEstimator
from evenstep.timemodels._cost_model import CostModel, fit_costs

SPEED = np.array([1.0, 1.0, 2.0, 4.0])


def lengths(rng, num_samples, spread=0.8):
    """Samples as in fine-tuning, with the features L and L**2."""
    length = np.clip(np.exp(rng.normal(5.5, spread, num_samples)), 1, 8192).astype(np.int64)
    return np.stack([length, length**2], 1)


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
    found = []
    for _ in range(50):
        work, _ = dealt(lengths(rng, 32, 1.2), rng.integers(0, 4, 32), 4)
        found.extend(abs(model.seconds(work) / true.seconds(work) - 1))
    return np.median(found)


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

    assert not estimator.is_useful


def test_features_that_predict_are_used_although_all_ranks_end_together():
    """Their times are alike then, which explains nothing: what counts is what is predicted."""
    true = CostModel(np.full(4, 0.01), np.array([1e-5, 1e-8]) / SPEED[:, None])
    estimator = observed(true, 40, np.random.default_rng(5), noise=0.03, balanced=True)

    assert estimator.is_useful
    assert estimator.error < 0.06 < estimator.error_by_count


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
    assert not estimator.is_useful
    with pytest.raises(ValueError, match="have the shapes"):
        estimator.observe([1, 2], [1, 1], [0.1, 0.2])
    with pytest.raises(ValueError, match="none of rank 1"):
        fit_costs([[[1], [2]]], [[0.1, np.nan]], [0, 0])
    with pytest.raises(ValueError, match="from 1 to 8"):
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
