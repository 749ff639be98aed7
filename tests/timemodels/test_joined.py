"""Models of different kinds side by side."""

import numpy as np
import pytest

from evenstep import AffineTime
from evenstep.timemodels import JoinedTime, PiecewiseTime

LINES = AffineTime(np.array([1.0, 2.0]), np.array([1.0, 1.0]))
DEVICE = PiecewiseTime(np.array([5.0]), np.array([10]), np.array([1.0]))


def test_every_rank_is_read_from_the_part_that_holds_it():
    """In whatever order the parts name them."""
    times = JoinedTime([LINES, DEVICE], [np.array([2, 0]), np.array([1])])

    assert times.world_size == 3
    assert times.seconds(np.array([4, 4, 4])).tolist() == [6, 5, 5]
    assert times.largest_batch(6.0, np.array([99, 8, 99])).tolist() == [4, 8, 5]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([[0, 1]], r"hold \[2, 1\] integers, one for each worker of each part, got shapes"),
        ([[0], [1, 2]], r"hold \[2, 1\] integers"),
        ([[0.0, 1.0], [2.0]], r"hold \[2, 1\] integers"),
        ([[0, 1], [1]], r"name each rank from 0 to 2 once, got \[0, 1, 1\]\. "),
        ([[1, 2], [3]], r"name each rank from 0 to 2 once, got \[1, 2, 3\]\. "),
    ],
)
def test_ranks_that_are_no_numbering_are_refused(ranks, message):
    """One too few, one too many, twice, or not from 0."""
    with pytest.raises(ValueError, match=rf"`JoinedTime\(ranks=...\)` must {message}"):
        JoinedTime([LINES, DEVICE], [np.array(each) for each in ranks])


def test_something_has_to_be_joined():
    """No parts, no workers."""
    with pytest.raises(ValueError, match=r"`JoinedTime\(parts=...\)` must hold a time model"):
        JoinedTime([], [])
