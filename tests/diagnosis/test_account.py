"""Where the time of a step went: nothing is lost, and who comes last waits for none."""

from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep._diagnosis import Phase, StepAccounts, accounted, time_by_phase

PARTS = slice(3, None)  # of an event, past its step, number of steps and wall


def spent(**phases):
    """Microseconds by phase."""
    row = [0] * len(Phase)
    for name, us in phases.items():
        row[Phase[name]] = us
    return row


@given(
    st.lists(
        st.tuples(st.sampled_from(Phase), st.floats(0, 1e4, allow_subnormal=False)), max_size=40
    )
)
def test_phases_add_up_to_the_step(both):
    """Up to half a microsecond each, whatever their order and number."""
    lasted_s = [seconds for _, seconds in both]
    found = time_by_phase(lasted_s, [phase for phase, _ in both])

    assert len(found) == len(Phase)
    assert sum(found) == pytest.approx(1e6 * sum(lasted_s), abs=0.5 * len(Phase) + 1e-3)


@given(st.integers(1, 4), st.integers(1, 5), st.data())
def test_parts_add_up_to_the_wall_time(num_steps, world_size, data):
    """On every rank; and no part is negative."""
    us = st.lists(st.integers(0, 10**7), min_size=len(Phase), max_size=len(Phase))
    rows = [[data.draw(us) for _ in range(world_size)] for _ in range(num_steps)]
    event = accounted(range(num_steps), rows)
    parts = np.array(astuple(event)[PARTS])

    assert parts.min() >= 0
    np.testing.assert_allclose(parts.sum(axis=0), event.wall_s, rtol=1e-12)
    np.testing.assert_allclose(event.wall_s, np.sum(rows, axis=(0, 2)) / 1e6)


def test_who_comes_last_waits_for_none():
    """Its time in the reduction is communication, for all; what others had more is waiting."""
    event = accounted([3], [[spent(BACKWARD=10, REDUCTION=90), spent(BACKWARD=80, REDUCTION=20)]])

    assert event.communication_s == pytest.approx((20e-6, 20e-6))
    assert event.waiting_s == pytest.approx((70e-6, 0.0))
    assert event.backward_s == pytest.approx((10e-6, 80e-6))


def test_another_rank_may_be_last_in_the_mean_and_in_the_next_step():
    """Each meeting of each step is looked at by itself: two waits do not hide each other."""
    one = [spent(REDUCTION=50, MEAN=1), spent(REDUCTION=5, MEAN=31)]
    other = [spent(REDUCTION=5), spent(REDUCTION=25)]
    event = accounted([3, 4], [one, other])

    assert (event.step, event.num_steps) == (4, 2)
    assert event.waiting_s == pytest.approx((45e-6, 50e-6))
    assert event.communication_s == pytest.approx((11e-6, 11e-6))


def test_short_steps_are_told_together():
    """As many as it takes; a step is complete once all ranks have told it, in any order."""
    accounts = StepAccounts(2, least_s=0.01)
    for step in range(3):
        assert not accounts.add(0, step, spent(REST=4000))
    assert not accounts.add(1, 1, spent(REST=1))
    assert not accounts.add(1, 0, spent(REST=2))
    assert accounts.add(1, 2, spent(REST=3))
    taken = accounts.take()

    assert [step for step, _ in taken] == [1, 0, 2]
    assert [[row[Phase.REST] for row in rows] for _, rows in taken] == [
        [4000, 1],
        [4000, 2],
        [4000, 3],
    ]
    assert accounts.take() == []


def test_a_step_that_a_rank_never_tells_of_is_forgotten():
    """Such as one in which its clock went back; others are told all the same."""
    accounts = StepAccounts(2, least_s=1e-9)
    for step in range(3000):
        accounts.add(0, step, spent(REST=1))

    assert not accounts.add(1, 0, spent(REST=1))
    assert accounts.add(1, 2999, spent(REST=1))
    assert [step for step, _ in accounts.take()] == [2999]
