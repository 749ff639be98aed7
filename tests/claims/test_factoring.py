"""How large the next claim is."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.claims import Factoring

speeds = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=9).map(np.array)
rules = st.builds(Factoring, st.floats(0.01, 1.0), st.integers(1, 20))


def test_a_claim_is_the_share_of_its_speed():
    """0.8 of 100 samples, of which a rank three times as fast as the other claims 3/4."""
    assert Factoring(0.8).next_claim(100, np.array([3.0, 1.0]), 0) == 60
    assert Factoring(0.8).next_claim(100, np.array([3.0, 1.0]), 1) == 20


@given(rules, speeds, st.integers(0, 10**6), st.data())
def test_a_claim_is_within_what_is_left(rule, speeds, remaining, data):
    """Never negative, never more than there is, at least the smallest unless it leaves the rest."""
    claim = rule.next_claim(remaining, speeds, data.draw(st.integers(0, len(speeds) - 1)))

    assert claim == 0 or min(rule.smallest, remaining) <= claim <= remaining


@given(rules, speeds, st.integers(1, 10**6))
def test_the_fastest_never_leaves_anything(rule, speeds, remaining):
    """So somebody is always there to end the step."""
    assert rule.next_claim(remaining, speeds, int(np.argmax(speeds))) >= 1


def test_who_would_end_last_claims_nothing():
    """A CPU that needs 8 ms for a sample leaves seven of them to a GPU that needs 1 ms each."""
    speeds = np.array([1000.0, 125.0])

    assert Factoring().next_claim(7, speeds, 1) == 0
    assert Factoring().next_claim(9, speeds, 1) == 1
    assert Factoring().next_claim(9, np.array([0.0, 125.0]), 1) > 1  # the GPU stays out


@pytest.mark.parametrize("world_size", [2, 8, 32])
def test_claims_are_few(world_size):
    """A logarithm of the samples, and about one for each rank at the end."""
    remaining, num_claims, equal = 4096, 0, np.ones(world_size)
    while remaining:
        remaining -= Factoring(0.8).next_claim(remaining, equal, num_claims % world_size)
        num_claims += 1

    estimate = world_size * (1 + np.log(4096 * 0.8 / world_size)) / 0.8
    assert num_claims == pytest.approx(estimate, rel=0.25)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Factoring(0.0), "share"),
        (lambda: Factoring(1.1), "share"),
        (lambda: Factoring(smallest=0), "smallest"),
        (lambda: Factoring(smallest=1.5), "smallest"),
        (lambda: Factoring().next_claim(-1, np.ones(2), 0), "remaining"),
        (lambda: Factoring().next_claim(5, np.zeros(2), 0), "speeds"),
        (lambda: Factoring().next_claim(5, np.array([1.0, -1.0]), 0), "speeds"),
        (lambda: Factoring().next_claim(5, np.array([1.0, np.nan]), 0), "speeds"),
    ],
)
def test_what_is_out_of_range_is_refused(make, match):
    """Each argument by its name."""
    with pytest.raises(ValueError, match=match):
        make()
