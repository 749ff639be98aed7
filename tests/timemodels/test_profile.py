"""What one worker measured, and what it cannot have."""

import numpy as np
import pytest

from evenstep.timemodels import Profile

GOOD = {"sizes": [2, 2, 4], "seconds": [0.1, 0.2, 0.3]}


def test_the_arrays_are_the_profiles_own():
    """Writing to what was given changes nothing, and the fields are read-only."""
    given_ = {name: np.array(value) for name, value in GOOD.items()}
    profile = Profile(**given_)
    for name, array in given_.items():
        array[:] = 1

        assert getattr(profile, name).tolist() == GOOD[name]
        assert not getattr(profile, name).flags.writeable


BAD_VALUES = [
    ("sizes", [4, 2, 4], r"be ascending, got 2 as measurement 1\. Sort: "),
    ("sizes", [0, 2, 4], r"be at least 1, got 0 as measurement 0\. "),
    ("sizes", [2, 2, 2], r"hold at least two sizes, got \[2\]\. "),
    ("sizes", [2.0, 2.0, 4.0], r"be a list of integers, got \[2.0, 2.0, 4.0\]\. "),
    ("sizes", [True, True, True], r"be a list of integers"),
    ("sizes", [2, [2], 4], r"be a list of integers"),
    ("sizes", [2, 4, 2**70], r"be a list of integers"),
    ("sizes", [], r"be a list of integers"),
    ("sizes", 4, r"be a list of integers, got 4\. "),
    ("seconds", [0.1, 0.2], r"have the shape \(3,\) of `sizes`, got \(2,\)\. "),
    ("seconds", [0.1, 0.0, 0.3], r"be positive and finite, got 0.0 as measurement 1\. "),
    ("seconds", [0.1, 0.2, float("nan")], r"be positive and finite, got nan as measurement 2\. "),
    ("seconds", [0.1, 0.2, float("inf")], r"be positive and finite, got inf"),
    ("seconds", ["a", "b", "c"], r"be a list of numbers"),
]


@pytest.mark.parametrize(("name", "bad", "message"), BAD_VALUES)
def test_what_was_never_measured_is_refused(name, bad, message):
    """By class and argument, rule, value and remedy."""
    with pytest.raises(ValueError, match=rf"`Profile\({name}=...\)` must {message}"):
        Profile(**(GOOD | {name: bad}))
