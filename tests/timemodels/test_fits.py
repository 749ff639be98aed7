"""Curves found again in noisy profiles."""

import numpy as np
import pytest

from evenstep import AffineTime, Cluster, allocate
from evenstep.timemodels import CubicTime, PiecewiseTime
from tests.timemodels.measured import DENSE, DOUBLING, curve, fit, of_one, profile

KINDS = {PiecewiseTime: 3, CubicTime: 4}  # and their parameters
CURVES = [
    (PiecewiseTime, of_one(AffineTime, 0.01, 1e-3), DOUBLING),
    (CubicTime, of_one(AffineTime, 0.01, 1e-3), DOUBLING),
    (PiecewiseTime, of_one(PiecewiseTime, 0.04, 40, 8e-4), DENSE),
    (PiecewiseTime, of_one(PiecewiseTime, 0.04, 100, 8e-4), DENSE),
    (CubicTime, of_one(CubicTime, [4e-9, -1.2e-6, 3e-4, 0.01], 256), DOUBLING),
    (CubicTime, of_one(CubicTime, [2e-9, 0.0, 2e-5, 0.01], 256), DOUBLING),
]
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.parametrize(("kind", "truth", "sizes"), CURVES)
def test_a_known_curve_is_found_under_noise_of_two_percent(kind, truth, sizes):
    """Five measurements a size: within 3 % at every size, the noise's own measure of a point."""
    for seed in range(20):
        found = fit(kind, *profile(truth, sizes, seed=seed))

        assert abs(curve(found) / curve(truth) - 1).max() < 0.03, seed


def test_the_parameters_are_the_curves_own():
    """Not only the times: the knee is what a person reads off."""
    truth = of_one(PiecewiseTime, 0.04, 100, 8e-4)
    for seed in range(20):
        knee = fit(PiecewiseTime, *profile(truth, DENSE, seed=seed))

        assert knee.flat_s[0] == pytest.approx(0.04, rel=0.02)
        assert knee.saturation[0] == pytest.approx(100, abs=8)
        assert knee.slope_s[0] == pytest.approx(8e-4, rel=0.1)


@pytest.mark.parametrize(("kind", "truth", "sizes"), CURVES)
def test_without_noise_the_curve_is_met(kind, truth, sizes):
    """Knees are tried one by one, so they are found exactly."""
    found = fit(kind, *profile(truth, sizes, noise=0))

    assert curve(found) == pytest.approx(curve(truth), rel=1e-6)


@every_kind
def test_a_hiccup_among_the_repeats_is_not_seen(kind):
    """The median of five stays where it was when one of them takes ten times as long."""
    truth = AffineTime(np.array([0.01]), np.array([1e-3]))
    (sizes,), (seconds,) = profile(truth, DOUBLING, noise=0)
    seconds[::5] *= 10

    assert curve(fit(kind, [sizes], [seconds])) == pytest.approx(
        curve(fit(kind, *profile(truth, DOUBLING, noise=0)))
    )


@every_kind
@pytest.mark.parametrize("rise", [0.0, -0.5])
def test_samples_are_never_free(kind, rise):
    """A profile that is flat, or falls, still gets a curve that rises somewhere."""
    sizes = np.array([1, 2, 4, 8, 16])
    times = fit(kind, [sizes], [2.0 + rise * np.log2(sizes) / 4])
    far_s = curve(times, np.array([1, 16, 2**20]))

    assert (np.diff(far_s) > 0).any()
    assert times.largest_batch(10.0, np.array([2**40]))[0] < 2**40
    assert (far_s > 0).all()


@every_kind
def test_noise_alone_never_makes_a_curve_that_falls(kind):
    """Whatever was measured, what comes out is a time model."""
    for seed in range(30):
        random = np.random.default_rng(seed)
        sizes = np.sort(random.choice(np.arange(1, 200), 9, replace=False))
        found = curve(fit(kind, [sizes], [random.exponential(size=9) + 1e-3]), np.arange(300))

        assert (np.diff(found) >= 0).all(), seed
        assert np.isfinite(found).all(), seed


def test_a_cubic_never_falls_by_itself():
    """The model would hold it level, but a fit that needs that is none."""
    for seed in range(60):
        random = np.random.default_rng(seed)
        sizes = np.sort(random.choice(np.arange(1, 200), 9, replace=False))
        found = fit(CubicTime, [sizes], [random.exponential(size=9) + 1e-3])
        cubic = np.polyval(found.coefficients[0], np.arange(sizes[-1] + 1))

        assert cubic[0] >= 0, seed
        assert (np.diff(cubic) > -1e-12).all(), seed


def test_a_line_has_its_knee_at_nothing():
    """Up to the smallest size measured, any knee would do."""
    truth = AffineTime(np.array([0.01]), np.array([1e-3]))

    assert fit(PiecewiseTime, *profile(truth, DOUBLING, noise=0)).saturation.tolist() == [0]


@every_kind
def test_every_worker_is_fitted_by_itself(kind):
    """Profiles of two lengths give what they would give alone."""
    truth = AffineTime(np.array([0.01]), np.array([1e-3]))
    (long,), (long_s,) = profile(truth, DENSE, seed=1)
    (short,), (short_s,) = profile(truth, DOUBLING, seed=2)
    both = fit(kind, [long, short], [long_s, short_s])
    alone = [fit(kind, [long], [long_s]), fit(kind, [short], [short_s])]

    assert both.world_size == 2
    for size in (1, 40, 256):
        expected = [float(each.seconds(np.array([size]))[0]) for each in alone]
        assert both.seconds(np.array([size, size])).tolist() == expected


@every_kind
def test_units_do_not_matter(kind):
    """Seconds or 1e-180 of them: the same curve, scaled."""
    truth = PiecewiseTime(np.array([0.04]), np.array([40]), np.array([8e-4]))
    sizes, (seconds,) = profile(truth, DENSE)
    scaled = curve(fit(kind, sizes, [seconds * 2.0**-600]))

    assert scaled == pytest.approx(curve(fit(kind, sizes, [seconds])) * 2.0**-600, rel=1e-9)


@pytest.mark.parametrize(("kind", "least"), KINDS.items())
def test_too_few_sizes_are_counted_out(kind, least):
    """As many as parameters are enough, one fewer is refused with the rank."""
    enough, fewer = np.arange(1, least + 1), np.arange(1, least)
    seconds = [np.ones(least), np.ones(least - 1)]

    assert fit(kind, [enough], seconds[:1]).world_size == 1
    rule = rf"`{kind.__name__}\.fitted\(profiles=...\)` must hold at least {least} different sizes "
    with pytest.raises(ValueError, match=rf"{rule}on rank 1, got"):
        fit(kind, [enough, fewer], seconds)


@every_kind
def test_no_profile_is_refused(kind):
    """With what to do."""
    with pytest.raises(ValueError, match=r"hold a profile for each worker, got none\. Measure"):
        fit(kind, [], [])


@every_kind
def test_a_fit_splits_by_speed(kind):
    """Three quarters go to the worker at three times the speed."""
    sizes = np.array([1, 2, 4, 8, 16, 24])
    times = fit(kind, [sizes, sizes], [0.001 * sizes, 0.003 * sizes])

    assert abs(allocate(times, Cluster(2, 20)) - [15, 5]).max() <= 1
