"""Flat, then a straight line or stairs."""

import numpy as np
import pytest

from evenstep import AffineTime, Cluster, allocate
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


def staircase(**changed):
    stairs = {"flat_s": [1.0, 0.0], "saturation": [0, 0], "slope_s": [2.0, 1.0], "tile": [4, 3]}
    return piecewise(**(stairs | changed))


def test_a_tile_is_paid_whole():
    """The first sample of one costs what all of it do."""
    times = staircase()

    assert [times.seconds(np.array([b, b])).tolist() for b in (0, 1, 4, 5)] == [
        [0, 0],
        [3, 1],
        [3, 2],
        [5, 2],
    ]


def test_tiles_begin_past_saturation():
    """Three samples for nothing, and then a tile of four."""
    times = staircase(saturation=[3, 0])

    assert [times.seconds(np.array([b, 0]))[0] for b in (1, 3, 4, 7, 8)] == [1, 1, 3, 3, 5]
    assert times.largest_batch(4.9, np.array([100, 0])).tolist() == [7, 0]


def test_a_budget_holds_whole_tiles_up_to_the_cap():
    """The cap may cut the last one short."""
    assert staircase().largest_batch(5.0, np.array([100, 10])).tolist() == [8, 10]


@pytest.mark.parametrize("tile", [None, np.ones(2, np.int64)])
def test_without_saturation_and_tiles_it_is_a_straight_line(tile):
    """Bit for bit."""
    intercept_s, slope_s, sizes = np.array([0.3, 0.7]), np.array([0.1, 1e-9]), np.array([7, 12345])
    times = PiecewiseTime(intercept_s, np.zeros(2, np.int64), slope_s, tile)

    assert times.seconds(sizes).tolist() == AffineTime(intercept_s, slope_s).seconds(sizes).tolist()


def test_no_tile_is_begun_for_one_sample_where_another_worker_has_room():
    """An even split of 72 would be 3 tiles of 16 each; 32 and 40 take 2 and 3."""
    times = staircase(flat_s=[0.0, 0.0], slope_s=[1.5, 1.0], tile=[16, 16])
    split = allocate(times, Cluster(2, 72))

    assert times.seconds(split).max() == 3
    assert split[0] <= 32


@pytest.mark.parametrize(
    ("name", "bad", "message"),
    [
        ("flat_s", [1.0, -1.0], r"be finite and at least 0 on every rank, got -1.0 on rank 1\. "),
        ("flat_s", 1.0, r"have shape \(world_size,\), got \(\)\. "),
        ("saturation", [4, -1], r"be in \[0, \d+\] on every rank, got -1 on rank 1\. "),
        ("saturation", [4.0, 2.5], r"be integers, got float64\. Count whole samples\."),
        ("saturation", [4], r"have the shape \(2,\) of `flat_s`, got \(1,\)\. "),
        ("slope_s", [0.5, np.inf], r"be finite .*, got inf on rank 1\. "),
        ("slope_s", [0.5, 1.0, 1.0], r"have the shape \(2,\) of `flat_s`, got \(3,\)\. "),
        ("tile", [4, 0], r"be in \[1, \d+\] on every rank, got 0 on rank 1\. "),
        ("tile", [4.0, 3.0], r"be integers, got float64\. "),
        ("tile", [4, 3, 2], r"have the shape \(2,\) of `flat_s`, got \(3,\)\. "),
    ],
)
def test_what_is_no_curve_is_named(name, bad, message):
    """Class and argument, rule, value, rank and remedy."""
    with pytest.raises(ValueError, match=rf"`PiecewiseTime\({name}=...\)` must {message}"):
        piecewise(**{name: bad})
