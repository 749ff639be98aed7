"""The rule of when a plan is due, as its benchmark plays it."""

from itertools import pairwise

import numpy as np

from benchmarks.due import ONSET, claims, drawn, percent, play, stops
from evenstep.policies import Auto


def test_a_plan_stays_until_the_step_that_is_due():
    """One in eight to ten steps of 5 ms; each in longer ones."""
    for step_s, most in ((0.060, 1), (0.020, 1), (0.005, 10)):
        played = play(drawn("burst", step_s, 0), Auto())
        due, sizes = np.array(played.due), played.sizes
        changed = [step for step, (one, other) in enumerate(pairwise(sizes)) if one != other]

        assert changed
        assert all(due[step] == step for step in changed)
        assert np.diff(np.unique(due))[5:].max() <= most


def test_long_steps_lose_nothing_by_it():
    """Each is due, so both ways are the same."""
    assert percent(("due", "step", 0.020, 0)) == percent(("every step", "step", 0.020, 0))


def test_an_onset_is_followed_after_the_step_that_is_due():
    """By all later steps; in 5 ms steps it may take until the end of a plan."""
    regret, kept = percent(("due", "onset", 0.005, 0))
    due = play(drawn("onset", 0.005, 0), Auto()).due[ONSET]

    assert 1 <= due + 1 - ONSET <= kept <= 10
    assert regret > percent(("every step", "onset", 0.005, 0))[0]


def test_stops_and_claims_meet_their_bars():
    """As in the whole benchmark."""
    assert all(row.met for row in (*stops(), *claims()))
