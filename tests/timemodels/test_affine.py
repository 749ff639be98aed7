"""Straight lines, and their exact inverse."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import AffineTime
from evenstep.timemodels import bisect_batch

COSTS = st.one_of(st.just(0.0), st.floats(1e-9, 1e3), st.floats(0, 1e12))


def test_no_samples_take_no_time():
    """The fixed cost is not paid by a worker that sits out."""
    times = AffineTime(np.array([3.0, 3.0]), np.array([2.0, 0.0]))

    assert times.seconds(np.array([0, 0])).tolist() == [0, 0]
    assert times.seconds(np.array([1, 4])).tolist() == [5, 3]


@given(COSTS, COSTS, st.integers(0, 10**6), st.integers(0, 10**6), st.sampled_from([-1, 0, 1]))
def test_the_largest_batch_is_exact_to_the_last_bit(intercept_s, slope_s, size, most, side):
    """Around a time that some size really takes, where a closed form errs by one."""
    times = AffineTime(np.array([intercept_s]), np.array([slope_s]))
    budget_s = float(times.seconds(np.array([size]))[0])
    budget_s = float(np.nextafter(budget_s, side * np.inf)) if side else budget_s
    batch = times.largest_batch(budget_s, np.array([most]))

    assert 0 <= batch[0] <= most
    assert batch[0] == 0 or times.seconds(batch)[0] <= budget_s
    assert batch[0] == most or times.seconds(batch + 1)[0] > budget_s
    assert batch == bisect_batch(times.seconds, budget_s, most=np.array([most]))


def test_a_flat_line_holds_all_or_nothing():
    """At a slope of 0 every batch takes as long as one sample."""
    times = AffineTime(np.array([3.0, 3.5]), np.zeros(2))

    assert times.largest_batch(3.0, np.array([70, 70])).tolist() == [70, 0]


def test_the_costs_are_the_models_own():
    """Writing to what was given changes nothing, and the fields are read-only."""
    slope_s = np.ones(2)
    times = AffineTime(np.zeros(2), slope_s)
    slope_s[0] = 9

    assert times.slope_s.tolist() == [1, 1]
    assert not times.slope_s.flags.writeable


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["intercept_s", "slope_s"])
def test_a_cost_that_cannot_be_is_named_by_rank(name, bad):
    """The message gives class and argument, rule, value, rank and remedy."""
    costs = {"intercept_s": np.zeros(2), "slope_s": np.ones(2), name: np.array([1.0, bad])}

    with pytest.raises(ValueError, match=rf"`AffineTime\({name}=...\)` .*, got {bad} on rank 1\. "):
        AffineTime(**costs)


@pytest.mark.parametrize(("intercept_s", "slope_s"), [(np.zeros(2), np.ones(3)), (0.0, 1.0)])
def test_one_value_per_worker_is_asked_for(intercept_s, slope_s):
    """Neither scalars nor two lengths."""
    with pytest.raises(ValueError, match="Give one value per worker"):
        AffineTime(intercept_s, slope_s)
