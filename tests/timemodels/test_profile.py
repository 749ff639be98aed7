"""Profiles, and what comes back of their JSON."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.timemodels import Profile

GOOD = {"sizes": [2, 2, 4], "seconds": [0.1, 0.2, 0.3], "peak_bytes": [5, 0, 7]}
MEASUREMENT = st.tuples(
    st.integers(1, 2**62), st.floats(0, exclude_min=True, allow_infinity=False), st.integers(0, 99)
)


def text(**changed):
    """What ``to_json`` writes of a good profile, with other fields; None takes one away."""
    record = json.loads(Profile(**GOOD).to_json()) | changed
    return json.dumps({name: value for name, value in record.items() if value != "gone"})


@given(st.lists(MEASUREMENT, min_size=2, unique_by=lambda each: each[0]), st.booleans())
def test_what_is_written_is_read_back_to_the_last_bit(measurements, with_peaks):
    """Sizes past a float's precision and denormal times included."""
    sizes, seconds, peaks = (list(each) for each in zip(*sorted(measurements), strict=True))
    profile = Profile(sizes, seconds, peaks if with_peaks else None)
    again = Profile.from_json(profile.to_json())

    assert again.sizes.tolist() == sizes
    assert again.seconds.tolist() == seconds
    assert (again.peak_bytes is not None) == with_peaks
    assert not with_peaks or again.peak_bytes.tolist() == peaks


def test_the_text_is_for_other_programs_too():
    """One object that says what it is, in plain lists."""
    assert json.loads(Profile([1, 2], [0.5, 1.0]).to_json()) == {
        "schema": "evenstep.profile",
        "version": 1,
        "sizes": [1, 2],
        "seconds": [0.5, 1.0],
        "peak_bytes": None,
    }


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
    ("peak_bytes", [5, -1, 7], r"be at least 0, got -1 as measurement 1\. "),
    ("peak_bytes", [5, 7], r"have the shape \(3,\) of `sizes`, got \(2,\)\. "),
    ("peak_bytes", [5, 0.5, 7], r"be a list of integers"),
]


@pytest.mark.parametrize(("name", "bad", "message"), BAD_VALUES)
def test_what_was_never_measured_is_refused(name, bad, message):
    """By class and argument, rule, value and remedy."""
    with pytest.raises(ValueError, match=rf"`Profile\({name}=...\)` must {message}"):
        Profile(**(GOOD | {name: bad}))


@pytest.mark.parametrize(("name", "bad", "message"), BAD_VALUES)
def test_a_file_is_no_way_round(name, bad, message):
    """Values from a text are checked as any others."""
    with pytest.raises(ValueError, match=rf"`Profile\({name}=...\)` must {message}"):
        Profile.from_json(text(**{name: bad}))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("", r"be JSON, got '' \("),
        (text()[:-1], r"be JSON"),
        ("[" * 100_000, r"be JSON"),
        ("[1, 2]", r'be an object of `"schema": "evenstep.profile"`, got \[1, 2\]\. '),
        ("{}", r"be an object of .*, got None\. "),
        (text(schema="evenstep.trace"), r"be an object of .*, got 'evenstep.trace'\. "),
        (text(version=2), r"be of a version from 1 to 1, got 2\. Upgrade evenstep"),
        (text(version=0), r"be of a version from 1 to 1, got 0\. "),
        (text(version=True), r"be of a version from 1 to 1, got True\. "),
        (text(version="gone"), r"be of a version from 1 to 1, got None\. "),
        (text(seconds="gone"), r"hold .* and nothing else, got \['seconds'\] missing or unknown"),
        (text(colour="red"), r"hold .* and nothing else, got \['colour'\] missing or unknown"),
    ],
)
def test_a_text_that_is_no_profile_says_why(bad, message):
    """Cut off, of another kind, of a newer evenstep, or with fields of its own."""
    with pytest.raises(ValueError, match=rf"`Profile.from_json\(text=...\)` must {message}"):
        Profile.from_json(bad)
