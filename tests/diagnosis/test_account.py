"""Where the time of a step went, who was slow behind others, and how that went on in time."""

import re
from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep._diagnosis import Cause, Phase, StepAccounts, accounted, time_by_phase

from .runs import names, shown, steps

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


STEP_US, NUM_STEPS, SPELL = 98_000, 160, 14
RUNS = range(40)


def late_by(level, seed):
    """Have rank 1 take that part of a step longer, by step, and all steps differ by 6 percent."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(0, 0.06, NUM_STEPS)

    def late(step, rank):
        more = STEP_US * (level(step) + noise[step]) if rank else 0.0
        return {"FORWARD": more / 3, "BACKWARD": 2 * more / 3}

    return late


@pytest.mark.parametrize(
    ("level", "cause"),
    [
        (lambda step: 0.2 * (step // SPELL % 2), Cause.CONTENTION),
        (lambda step: 0.1, Cause.SLOW_WORKER),
        (lambda step: 0.2 * step / NUM_STEPS, Cause.THROTTLING),
    ],
)
def test_spells_are_told_from_noise(level, cause):
    """Each takes a tenth of the time. Single steps beyond the middle of two levels are noise."""
    found = [
        names(shown(steps(NUM_STEPS, 2, late=late_by(level, seed), seed=seed)).diagnose())
        for seed in RUNS
    ]

    assert sum(one[:1] == [(cause, 1)] for one in found) >= 0.9 * len(RUNS)


def slow(by, since=0):
    """What a rank computes longer from a step on, in forward and backward alike."""
    return lambda step: {"FORWARD": by // 3, "BACKWARD": by * 2 // 3} if step >= since else {}


@pytest.mark.parametrize("others", [2, 3])
def test_a_slow_rank_does_not_hide_behind_what_changes_from_step_to_step(others):
    """A long step comes on one rank or another, by turns that a seed draws."""
    whose = np.random.default_rng(1).integers(others, size=150)

    def late(step, rank):
        more = slow(27_000 * (rank == 1) + 120_000 * (rank == whose[step]))
        return more(step)

    found = shown(steps(150, others, late=late)).diagnose()

    assert sorted(names(found), key=str) == [(Cause.ROTATING, None), (Cause.SLOW_WORKER, 1)]


@pytest.mark.parametrize("whole_run", [False, True])
def test_of_two_slow_ranks_both_are_named_if_they_became_slow_one_after_the_other(whole_run):
    """Of two ranks the faster one is usual, were it not for earlier steps."""
    each = slow(45_000, since=20), slow(81_000, since=60)
    told = shown(steps(160, 2, late=lambda step, rank: each[rank](step))).diagnose(
        whole_run=whole_run
    )

    assert names(told) == [(Cause.SLOW_WORKER, 1), (Cause.SLOW_WORKER, 0)]
    assert "times as long as was usual before" in told.evidence[1]


@pytest.mark.parametrize("before", [0, 90_000], ids=["larger inputs", "samples of a slow rank"])
def test_ranks_that_change_together_are_not_slow(before):
    """From step 60 on both take longer; or the one that was slow gives samples to the other."""
    later = slow(45_000)

    def late(step, rank):
        return later(step) if step >= 60 else slow(before * rank)(step)

    told = shown(steps(600, 2, late=late)).diagnose(whole_run=True)

    assert (Cause.SLOW_WORKER, 0) not in names(told)


def test_ranks_whose_parts_change_are_not_held_against_earlier_times():
    """As under a balancer: one became slow, and then the other one got samples of it."""
    each = slow(45_000, since=20), slow(81_000, since=60)
    told = shown(
        steps(160, 2, late=lambda step, rank: each[rank](step)), parts_stay=False
    ).diagnose()

    assert (Cause.SLOW_WORKER, 0) not in names(told)


def test_how_much_longer_a_rank_computes_is_said_where_it_is_little():
    """Five percent of it, on the rank that waits for input besides."""
    small, disk = {"FORWARD": 1_500, "BACKWARD": 3_000}, {"INPUT": 45_000}
    found = steps(60, 4, late=lambda step, rank: small | disk if rank == 2 else {})
    told = shown(found).diagnose(whole_run=True)

    assert names(told)[1:] == [(Cause.SLOW_WORKER, 2)]
    words = r"it computes [4-6](\.\d)? % longer than the others, throughout"
    assert re.match(words, told.evidence[1])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_whose_computing_is_not_known_have_no_level(world_size):
    """As where computing and waiting cannot be told apart: no division by nothing."""
    found = steps(80, world_size, late=lambda step, rank: {"REST": 40_000 * rank})
    for rows in found:
        for row in rows:
            row[Phase.REST] += row[Phase.FORWARD] + row[Phase.BACKWARD]
            row[Phase.FORWARD] = row[Phase.BACKWARD] = 0

    told = shown(found).diagnose()

    assert (Cause.SLOW_WORKER, world_size - 1) not in names(told)
