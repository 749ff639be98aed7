"""Stairs, a tile wide each."""

import numpy as np
import pytest

from evenstep import AffineTime, Cluster, allocate
from evenstep.timemodels import StaircaseTime

GOOD = {"intercept_s": [1.0, 0.0], "stair_s": [2.0, 1.0], "tile": [4, 3]}


def staircase(**changed):
    return StaircaseTime(**{name: np.array(value) for name, value in (GOOD | changed).items()})


def test_a_tile_is_paid_whole():
    """The first sample of one costs what all of it do."""
    times = staircase()

    assert [times.seconds(np.array([b, b])).tolist() for b in (0, 1, 4, 5)] == [
        [0, 0],
        [3, 1],
        [3, 2],
        [5, 2],
    ]


def test_a_budget_holds_whole_tiles_up_to_the_cap():
    """The cap may cut the last one short."""
    assert staircase().largest_batch(5.0, np.array([100, 10])).tolist() == [8, 10]


def test_tiles_of_one_sample_are_a_straight_line():
    """Bit for bit."""
    costs, sizes = (np.array([0.3, 0.7]), np.array([0.1, 1e-9])), np.array([7, 12345])
    times = StaircaseTime(*costs, np.ones(2, np.int64))

    assert times.seconds(sizes).tolist() == AffineTime(*costs).seconds(sizes).tolist()


def test_nobody_starts_a_tile_for_one_sample_where_another_has_room():
    """An even split of 72 would be 3 tiles of 16 each; 32 and 40 take 2 and 3."""
    times = staircase(intercept_s=[0.0, 0.0], stair_s=[1.5, 1.0], tile=[16, 16])
    split = allocate(times, Cluster(2, 72))

    assert times.seconds(split).max() == 3
    assert split[0] <= 32


@pytest.mark.parametrize(
    ("name", "bad", "message"),
    [
        ("intercept_s", [1.0, np.nan], r"be finite and at least 0 .*, got nan on rank 1\. "),
        ("stair_s", [-2.0, 1.0], r"be finite and at least 0 .*, got -2.0 on rank 0\. "),
        ("stair_s", [2.0], r"have the shape \(2,\) of `intercept_s`, got \(1,\)\. "),
        ("tile", [4, 0], r"be in \[1, \d+\], got 0 on rank 1\. "),
        ("tile", [4.0, 3.0], r"be integers, got float64\. "),
        ("tile", [4, 3, 2], r"have the shape \(2,\) of `intercept_s`, got \(3,\)\. "),
    ],
)
def test_what_is_no_staircase_is_named(name, bad, message):
    """Class and argument, rule, value, rank and remedy."""
    with pytest.raises(ValueError, match=rf"`StaircaseTime\({name}=...\)` must {message}"):
        staircase(**{name: bad})
