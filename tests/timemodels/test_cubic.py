"""LBB's cubic, held up where it falls."""

import numpy as np
import pytest

from evenstep.timemodels import CubicTime


def seconds(times, sizes):
    return [float(times.seconds(np.array([size]))[0]) for size in sizes]


def test_a_cubic_that_rises_is_read_as_it_is():
    """p3 b^3 + p2 b^2 + p1 b + p0, in the paper's order, and 0 without samples."""
    times = CubicTime(np.array([[1.0, 2.0, 3.0, 4.0]]), np.array([10]))

    assert seconds(times, [0, 1, 2, 10]) == [0, 10, 26, 1234]


def test_where_it_falls_it_is_held_level():
    """(b - 2)^2 (b - 8) + 40 climbs to 40 at 2, dips to 8 at 6, and is past 40 from 9 on."""
    dips = np.array([[1.0, -12.0, 36.0, 8.0]])
    times = CubicTime(dips, np.array([10]))

    assert seconds(times, [1, 2, 3, 6, 8, 9]) == [33, 40, 40, 40, 40, 89]


def test_a_cubic_below_zero_is_free_of_charge_there():
    """A time is never negative."""
    times = CubicTime(np.array([[0.0, 0.0, 1.0, -3.0]]), np.array([10]))

    assert seconds(times, [1, 3, 4]) == [0, 0, 1]


@pytest.mark.parametrize(
    ("coefficients", "last_s", "slope_s"),
    [([0.0, 1.0, 0.0, 0.0], 100, 19), ([0.0, 0.0, 1.0, 90.0], 100, 10), ([0, 0, 0, 50], 50, 5)],
)
def test_past_the_profile_it_goes_straight_on(coefficients, last_s, slope_s):
    """By the last step, or by the average where that is steeper: never for free."""
    times = CubicTime(np.array([coefficients]), np.array([10]))

    assert seconds(times, [10, 11, 30]) == [last_s, last_s + slope_s, last_s + 20 * slope_s]


def test_every_worker_has_a_profile_of_its_own():
    """The shorter one is not read past its end."""
    times = CubicTime(np.array([[0.0, 0, 1, 0], [0.0, 1, 0, 0]]), np.array([2, 4]))

    assert times.seconds(np.array([4, 4])).tolist() == [4, 16]
    assert times.seconds(np.array([2, 6])).tolist() == [2, 30]


@pytest.mark.parametrize(
    ("coefficients", "most", "message"),
    [
        (np.ones((2, 3)), [9, 9], r"CubicTime\(coefficients=...\)` must have shape .* got \(2, 3"),
        (np.ones(4), [9], r"CubicTime\(coefficients=...\)` must have shape"),
        ([[0, 0, 1, 0], [0, np.nan, 1, 0]], [9, 9], r"must be finite .* nan .* on rank 1\. "),
        ([[0, 0, 1, 0], [0, 0, -1, 0]], [9, 9], r"positive time somewhere .* on rank 1\. "),
        ([[1e300, 0, 0, 0]], [2**20], r"a finite, positive time somewhere on 1..most"),
        ([[0, 0, 1, 0]], [9, 9], r"CubicTime\(most=...\)` must have the shape \(1,\) of "),
        (
            [[0, 0, 1, 0]],
            [0],
            r"must be in \[1, 1048576\] on every rank, got 0 on rank 0",
        ),
        (
            [[0, 0, 1, 0]],
            [2**20 + 1],
            r"must be in \[1, 1048576\] on .*, got 1048577 on rank 0",
        ),
        ([[0, 0, 1, 0]], [9.0], r"CubicTime\(most=...\)` must be integers, got float64"),
    ],
)
def test_what_is_no_curve_is_named(coefficients, most, message):
    """Class and argument, rule, value, rank and remedy."""
    with pytest.raises(ValueError, match=message):
        CubicTime(np.array(coefficients, np.float64), np.array(most))
