"""The profiles of all workers together, and what comes back of their JSON."""

import json

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from evenstep import Cluster, allocate
from evenstep.timemodels import ClusterProfile, CubicTime, PiecewiseTime, Profile

FAST = Profile([1, 2, 2, 4, 8, 16], [0.02, 0.03, 0.05, 0.05, 0.09, 0.17], [10, 20, 25, 40, 80, 0])
SLOW = Profile([1, 2, 4, 6], [0.04, 0.07, 0.13, 0.19])
WORKERS = ("n1 cuda GPU-a", "n2 cpu")


def both(**changed):
    """A profile of two workers, one of which ran out of memory."""
    given = {
        "workers": WORKERS,
        "profiles": (FAST, SLOW),
        "capacity_bytes": [900, 0],
        "out_of_memory": [0, 8],
        "model": "Net",
    }
    return ClusterProfile(**(given | changed))


def text(**changed):
    """Its JSON, with other fields."""
    return json.dumps(json.loads(both().to_json()) | changed)


def test_workers_need_not_have_the_same_sizes():
    """The tables hold all sizes, and say where a worker was not measured."""
    profile = both()

    assert profile.world_size == 2
    assert profile.sizes.tolist() == [1, 2, 4, 6, 8, 16]
    np.testing.assert_equal(
        profile.seconds.T,
        [[0.02, 0.04, 0.05, np.nan, 0.09, 0.17], [0.04, 0.07, 0.13, 0.19, np.nan, np.nan]],
    )
    assert profile.peak_bytes.T.tolist() == [[10, 25, 40, 0, 80, 0], [0] * 6]


def test_what_is_written_is_read_back_to_the_last_bit():
    """With what was not known."""
    again = ClusterProfile.from_json(both().to_json())

    assert again.workers == WORKERS
    assert again.model == "Net"
    assert again.out_of_memory.tolist() == [0, 8]
    assert again.capacity_bytes.tolist() == [900, 0]
    assert again.to_json() == both().to_json()
    np.testing.assert_array_equal(again.seconds, both().seconds)
    bare = ClusterProfile(WORKERS, (FAST, SLOW))
    assert ClusterProfile.from_json(bare.to_json()).capacity_bytes.tolist() == [0, 0]


MEASUREMENT = st.tuples(
    st.integers(1, 2**62), st.floats(0, exclude_min=True, allow_infinity=False), st.integers(0, 99)
)


@given(st.lists(MEASUREMENT, min_size=2, unique_by=lambda each: each[0]), st.booleans())
def test_sizes_and_times_of_any_kind_come_back(measurements, with_peaks):
    """Sizes past a float's precision and denormal times included."""
    sizes, seconds, peaks = (list(each) for each in zip(*sorted(measurements), strict=True))
    profile = Profile(sizes, seconds, peaks if with_peaks else None)
    (again,) = ClusterProfile.from_json(ClusterProfile(["n1"], [profile]).to_json()).profiles

    assert again.sizes.tolist() == sizes
    assert again.seconds.tolist() == seconds
    assert (again.peak_bytes is not None) == with_peaks
    assert not with_peaks or again.peak_bytes.tolist() == peaks


def test_it_makes_what_the_policies_take():
    """Curves of every worker, by which three quarters go to the one at three times the speed."""
    profile, cluster = both(), Cluster(2, 20)

    assert isinstance(profile.cubic(), CubicTime)
    assert isinstance(profile.piecewise(), PiecewiseTime)
    for times in (profile.best_fit().times, profile.cubic(), profile.piecewise()):
        assert abs(allocate(times, cluster) - [15, 5]).max() <= 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"workers": ()}, r"workers=...\)` must be a list of texts, got \(\)"),
        ({"workers": "n1"}, r"workers=...\)` must be a list of texts"),
        ({"workers": (1, 2)}, r"workers=...\)` must be a list of texts"),
        ({"profiles": (FAST,)}, r"profiles=...\)` must be 2 `Profile`s, one for each"),
        ({"profiles": (FAST, 3)}, r"profiles=...\)` must be 2 `Profile`s"),
        ({"capacity_bytes": [1]}, r"capacity_bytes=...\)` must be 2 integers of at least 0"),
        ({"out_of_memory": [0, -1]}, r"out_of_memory=...\)` must be 2 integers .* got \[0, -1\]"),
        ({"out_of_memory": [0.5, 1]}, r"out_of_memory=...\)` must be 2 integers"),
        ({"out_of_memory": [[1], 2]}, r"out_of_memory=...\)` must be 2 integers"),
    ],
)
def test_what_does_not_belong_together_is_refused(changed, message):
    """By class and argument, rule, value and remedy."""
    with pytest.raises(ValueError, match=rf"`ClusterProfile\({message}"):
        both(**changed)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("", r"`ClusterProfile.from_json\(text=...\)` must be JSON"),
        (text()[:-1], r"must be JSON"),
        ("[" * 100_000, r"must be JSON"),
        ("[1, 2]", r'must be an object of `"schema": "evenstep.cluster-profile"`, got \[1, 2\]'),
        (text(schema="evenstep.trace"), r"must be an object of"),
        (text(version=2), r"must be of a version from 1 to 1, got 2\. Upgrade evenstep"),
        (text(version=0), r"must be of a version from 1 to 1, got 0"),
        (text(version=True), r"must be of a version from 1 to 1, got True"),
        (text(colour="red"), r"\['colour'\] missing or unknown"),
        (text(workers="n1"), r"`ClusterProfile\(workers=...\)` must be a list, got 'n1'"),
        (text(workers=[1, 2]), r"must be a list of texts"),
        (text(profiles=None), r"`ClusterProfile\(profiles=...\)` must be a list"),
        (text(profiles=[1, 2]), r"must hold the arguments of `Profile`s"),
        (text(profiles=[{"sizes": [1, 2]}] * 2), r"must hold the arguments of `Profile`s"),
        (text(profiles=[{"sizes": [2, 1], "seconds": [1, 1]}] * 2), r"`Profile\(sizes=...\)` must"),
        (text(out_of_memory=[0, 2**70]), r"must be 2 integers"),
    ],
)
def test_a_text_that_is_none_says_why(bad, message):
    """Cut off, of another kind, of a newer evenstep, or with values that nothing has."""
    with pytest.raises(ValueError, match=message):
        ClusterProfile.from_json(bad)


def test_the_arrays_are_its_own():
    """Writing to what was given changes nothing, and the fields are read-only."""
    given = np.array([5, 6])
    profile = both(capacity_bytes=given)
    given[:] = 1

    assert profile.capacity_bytes.tolist() == [5, 6]
    assert not profile.capacity_bytes.flags.writeable
