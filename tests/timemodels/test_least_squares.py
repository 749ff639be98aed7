"""Least squares with bounds, against scipy's."""

import numpy as np
import pytest
from scipy.optimize import lsq_linear, nnls

from evenstep.timemodels._least_squares import LEAST_RISE, Points, lines_through, nonnegative


def relative_loss(predicted, y):
    return ((predicted / y - 1) ** 2).mean()


def test_no_coefficients_err_less_without_a_negative_one():
    """On columns of all sorts, those of which some have to stay out included."""
    for seed in range(200):
        random = np.random.default_rng(seed)
        columns, y = random.normal(size=(7, 4)), random.uniform(0.1, 3, 7)
        found = nonnegative(columns, y)
        expected, _ = nnls(columns / y[:, None], np.ones(7))

        assert (found >= 0).all(), seed
        assert found == pytest.approx(expected, abs=1e-9), seed


def test_no_line_errs_less_within_its_bounds():
    """For every candidate by itself: rising, falling, and with an intercept below 0."""
    for seed in range(200):
        random = np.random.default_rng(seed)
        x, y = random.integers(0, 9, (5, 6)) + np.eye(5, 6), random.uniform(0.1, 3, 6)
        lines = lines_through(x, y)
        typical = (1 / y).sum() / (y**-2.0).sum()
        for row, intercept, slope, loss in zip(
            x, lines.intercept, lines.slope, lines.loss, strict=True
        ):
            least = LEAST_RISE * typical / row.max()
            scaled = np.stack([1 / y, row / y], axis=1)
            best = lsq_linear(scaled, np.ones(6), bounds=([0, least], np.inf), tol=1e-14).x

            assert intercept >= 0, seed
            assert slope >= least * (1 - 1e-12), seed
            assert loss == pytest.approx(relative_loss(intercept + slope * row, y)), seed
            assert loss <= relative_loss(best[0] + best[1] * row, y) + 1e-9, seed


def test_a_size_is_one_point_however_often_it_was_measured():
    """The median of its times, in whatever number."""
    points = Points.of(np.array([2, 2, 2, 4, 4, 8]), np.array([9.0, 1.0, 2.0, 3.0, 5.0, 7.0]))

    assert points.sizes.tolist() == [2, 4, 8]
    assert points.seconds.tolist() == [2, 4, 7]
