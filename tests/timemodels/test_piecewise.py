"""Flat, then a straight line."""

import numpy as np
import pytest

from evenstep import Cluster, allocate
from evenstep.timemodels import PiecewiseTime

GOOD = {"flat_s": [1.0, 2.0], "saturation": [4, 0], "slope_s": [0.5, 0.5]}


def piecewise(**changed):
    return PiecewiseTime(**{name: np.array(value) for name, value in (GOOD | changed).items()})


def test_any_batch_that_does_not_fill_the_device_takes_as_long():
    """And a worker without samples takes no time at all."""
    times = piecewise()

    assert [times.seconds(np.array([b, b])).tolist() for b in (0, 1, 4, 6)] == [
        [0, 0],
        [1, 2.5],
        [1, 4],
        [2, 5],
    ]


def test_a_budget_below_the_flat_part_holds_nothing():
    """At it, all that the device takes in at once."""
    times, most = piecewise(), np.array([9, 9])

    assert times.largest_batch(np.nextafter(1.0, 0), most).tolist() == [0, 0]
    assert times.largest_batch(1.0, most).tolist() == [4, 0]
    assert times.largest_batch(2.4, most).tolist() == [6, 0]


def test_a_device_is_filled_before_others_are_given_more():
    """Up to saturation samples are free, so the larger device takes what it can for nothing."""
    times = piecewise(flat_s=[1.0, 1.0], saturation=[30, 10], slope_s=[0.1, 0.1])

    assert allocate(times, Cluster(2, 40)).tolist() == [30, 10]
    assert allocate(times, Cluster(2, 60)).tolist() == [40, 20]


@pytest.mark.parametrize(
    ("name", "bad", "message"),
    [
        ("flat_s", [1.0, -1.0], r"be finite and at least 0 on every rank, got -1.0 on rank 1\. "),
        ("flat_s", 1.0, r"have shape \(world_size,\), got \(\)\. "),
        ("saturation", [4, -1], r"be in \[0, \d+\], got -1 on rank 1\. "),
        ("saturation", [4.0, 2.5], r"be integers, got float64\. Count whole samples\."),
        ("saturation", [4], r"have the shape \(2,\) of `flat_s`, got \(1,\)\. "),
        ("slope_s", [0.5, np.inf], r"be finite .*, got inf on rank 1\. "),
        ("slope_s", [0.5, 1.0, 1.0], r"have the shape \(2,\) of `flat_s`, got \(3,\)\. "),
    ],
)
def test_what_is_no_curve_is_named(name, bad, message):
    """Class and argument, rule, value, rank and remedy."""
    with pytest.raises(ValueError, match=rf"`PiecewiseTime\({name}=...\)` must {message}"):
        piecewise(**{name: bad})
