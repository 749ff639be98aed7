"""Curves found again in noisy profiles."""

import numpy as np
import pytest

from evenstep import AffineTime
from evenstep.timemodels import (
    CubicTime,
    PiecewiseTime,
    StaircaseTime,
    fit_affine,
    fit_cubic,
    fit_piecewise,
    fit_staircase,
)
from tests.timemodels.measured import DENSE, DOUBLING, curve, of_one, profile

FITS = {fit_affine: 2, fit_piecewise: 3, fit_staircase: 3, fit_cubic: 4}
CURVES = [
    (fit_affine, of_one(AffineTime, 0.01, 1e-3), DOUBLING),
    (fit_piecewise, of_one(PiecewiseTime, 0.04, 40, 8e-4), DENSE),
    (fit_piecewise, of_one(PiecewiseTime, 0.04, 100, 8e-4), DENSE),
    (fit_staircase, of_one(StaircaseTime, 0.01, 0.02, 32), DENSE),
    (fit_staircase, of_one(StaircaseTime, 0.0, 0.02, 48), DENSE),
    (fit_cubic, of_one(CubicTime, [4e-9, -1.2e-6, 3e-4, 0.01], 256), DOUBLING),
    (fit_cubic, of_one(CubicTime, [2e-9, 0.0, 2e-5, 0.01], 256), DOUBLING),
]
every_fit = pytest.mark.parametrize("fit", FITS, ids=lambda fit: fit.__name__)


@pytest.mark.parametrize(("fit", "truth", "sizes"), CURVES)
def test_a_known_curve_is_found_under_noise_of_two_percent(fit, truth, sizes):
    """Five measurements a size: within 3 % at every size, the noise's own measure of a point."""
    for seed in range(20):
        found = fit(*profile(truth, sizes, seed=seed))

        assert abs(curve(found) / curve(truth) - 1).max() < 0.03, seed


def test_the_parameters_are_the_curves_own():
    """Not only the times: knee and tile are what a person reads off."""
    truth = PiecewiseTime(np.array([0.04]), np.array([100]), np.array([8e-4]))
    stairs = StaircaseTime(np.array([0.01]), np.array([0.02]), np.array([48]))
    for seed in range(20):
        knee = fit_piecewise(*profile(truth, DENSE, seed=seed))
        tile = fit_staircase(*profile(stairs, DENSE, seed=seed))

        assert knee.flat_s[0] == pytest.approx(0.04, rel=0.02)
        assert knee.saturation[0] == pytest.approx(100, abs=8)
        assert knee.slope_s[0] == pytest.approx(8e-4, rel=0.1)
        assert tile.tile[0] == 48


@pytest.mark.parametrize(("fit", "truth", "sizes"), CURVES)
def test_without_noise_the_curve_is_met(fit, truth, sizes):
    """Knees and tiles are tried one by one, so they are found exactly."""
    found = fit(*profile(truth, sizes, noise=0))

    assert curve(found) == pytest.approx(curve(truth), rel=1e-6)


@every_fit
def test_a_hiccup_among_the_repeats_is_not_seen(fit):
    """The median of five stays where it was when one of them takes ten times as long."""
    truth = AffineTime(np.array([0.01]), np.array([1e-3]))
    (sizes,), (seconds,) = profile(truth, DOUBLING, noise=0)
    seconds[::5] *= 10

    assert curve(fit([sizes], [seconds])) == pytest.approx(
        curve(fit(*profile(truth, DOUBLING, noise=0)))
    )


@every_fit
@pytest.mark.parametrize("rise", [0.0, -0.5])
def test_samples_are_never_free(fit, rise):
    """A profile that is flat, or falls, still gets a curve that rises somewhere."""
    sizes = np.array([1, 2, 4, 8, 16])
    times = fit([sizes], [2.0 + rise * np.log2(sizes) / 4])
    far_s = curve(times, np.array([1, 16, 2**20]))

    assert (np.diff(far_s) > 0).any()
    assert times.largest_batch(10.0, np.array([2**40]))[0] < 2**40
    assert (far_s > 0).all()


@every_fit
def test_noise_alone_never_makes_a_curve_that_falls(fit):
    """Whatever was measured, what comes out is a time model."""
    for seed in range(30):
        random = np.random.default_rng(seed)
        sizes = np.sort(random.choice(np.arange(1, 200), 9, replace=False))
        found = curve(fit([sizes], [random.exponential(size=9) + 1e-3]), np.arange(300))

        assert (np.diff(found) >= 0).all(), seed
        assert np.isfinite(found).all(), seed


def test_a_cubic_never_falls_by_itself():
    """The model would hold it level, but a fit that needs that is none."""
    for seed in range(60):
        random = np.random.default_rng(seed)
        sizes = np.sort(random.choice(np.arange(1, 200), 9, replace=False))
        found = fit_cubic([sizes], [random.exponential(size=9) + 1e-3])
        cubic = np.polyval(found.coefficients[0], np.arange(sizes[-1] + 1))

        assert cubic[0] >= 0, seed
        assert (np.diff(cubic) > -1e-12).all(), seed


def test_a_line_through_powers_of_two_has_tiles_of_one():
    """They fit many tiles as well, and the smallest promises no stairs that nobody saw."""
    truth = AffineTime(np.array([0.01]), np.array([1e-3]))

    assert fit_staircase(*profile(truth, DOUBLING, noise=0)).tile.tolist() == [1]


def test_a_line_has_its_knee_at_nothing():
    """Up to the smallest size measured, any knee would do."""
    truth = AffineTime(np.array([0.01]), np.array([1e-3]))

    assert fit_piecewise(*profile(truth, DOUBLING, noise=0)).saturation.tolist() == [0]


@every_fit
def test_every_worker_is_fitted_by_itself(fit):
    """Profiles of two lengths give what they would give alone."""
    truth = AffineTime(np.array([0.01]), np.array([1e-3]))
    (long,), (long_s,) = profile(truth, DENSE, seed=1)
    (short,), (short_s,) = profile(truth, DOUBLING, seed=2)
    both = fit([long, short], [long_s, short_s])
    alone = [fit([long], [long_s]), fit([short], [short_s])]

    assert both.world_size == 2
    for size in (1, 40, 256):
        expected = [float(each.seconds(np.array([size]))[0]) for each in alone]
        assert both.seconds(np.array([size, size])).tolist() == expected


@every_fit
def test_units_do_not_matter(fit):
    """Seconds or 1e-180 of them: the same curve, scaled."""
    truth = PiecewiseTime(np.array([0.04]), np.array([40]), np.array([8e-4]))
    sizes, (seconds,) = profile(truth, DENSE)
    scaled = curve(fit(sizes, [seconds * 2.0**-600]))

    assert scaled == pytest.approx(curve(fit(sizes, [seconds])) * 2.0**-600, rel=1e-9)


@pytest.mark.parametrize(("fit", "least"), FITS.items())
def test_too_few_sizes_are_counted_out(fit, least):
    """As many as parameters are enough, one fewer is refused with the rank."""
    enough, fewer = np.arange(1, least + 1), np.arange(1, least)
    seconds = [np.ones(least), np.ones(least - 1)]

    assert fit([enough], seconds[:1]).world_size == 1
    rule = "two sizes on rank 1" if least == 2 else f"{least} different sizes on rank 1"
    with pytest.raises(ValueError, match=rf"`{fit.__name__}\(sizes=...\)` must .*{rule}, got"):
        fit([enough, fewer], seconds)


@every_fit
@pytest.mark.parametrize(
    ("sizes", "seconds", "message"),
    [
        ([], [], r"\(sizes=...\)` must hold a profile, got none\. "),
        ([[1, 2]], [], r"\(seconds=...\)` must hold as many arrays as `sizes`, 1, got 0\. "),
        ([1, 2, 3], [1.0, 2.0, 3.0], r"\(sizes=...\)` must be a list of integers on rank 0, got 1"),
        ([[1, 2], [2, 1]], [[1, 2], [1, 2]], r"\(sizes=...\)` must be ascending on rank 1, got 1"),
        ([[1, 2], [1, 2]], [[1, 2], [1, 0]], r"\(seconds=...\)` must be positive .* on rank 1"),
    ],
)
def test_what_is_no_profile_is_named_by_rank(fit, sizes, seconds, message):
    """Function and argument, rule, rank, value and remedy."""
    with pytest.raises(ValueError, match=rf"`{fit.__name__}{message}"):
        fit(sizes, seconds)
