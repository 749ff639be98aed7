"""A race is run once and kept; its file is read as pairs of turns and spreads of seeds."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from benchmarks.arena._figures import Spread, bound_of, paired, standings
from benchmarks.arena._race import steps_until

AUTO, OTHER = 0.5, 0.6


def entry(name, step_s, seed=0, accuracy=()):
    """What a race says of a contestant whose steps take as long, but for noise of its turns."""
    noise = np.array([3.0, 1.0, 1.01, 0.99])
    return {
        "name": name,
        "seed": seed,
        "turns": [{"seconds": 10 * step_s * each} for each in noise],
        "num_samples": 40 * 512,
        "updates_s": np.cumsum(np.repeat(step_s * noise, 10)).tolist(),
        "accuracy": accuracy,
        "cpu_s": [0.1, 0.2],
        "slept_s": [2.0, 0.0],
        "late_ms": [[0.1, 2.0], [0.1, 3.0]],
    }


COURSES = {"0": [0.5] * 9 + [0.95] * 31, "1": [0.5] * 11 + [0.92] * 29}
EXACT = {
    "cell": {"setup": "lbb-static", "name": "exact", "duration_s": 24.0},
    "entries": [entry("ddp", 1.0), entry("auto", AUTO), entry("flexrr", OTHER)],
    "one_process": COURSES,
}
INEXACT = {
    "cell": {"setup": "lbb-static", "name": "asp", "duration_s": 24.0},
    "entries": [
        entry("asp", 0.4, seed, [[2.0, 0.5], [4.0 + seed, 0.91], [6.0, 0.94]]) for seed in range(2)
    ],
}


def test_steps_are_compared_in_the_same_turns():
    """What all turns have in common cancels; the first turn, of learning, is left out."""
    ratio = paired(EXACT["entries"][1], EXACT["entries"][2])

    assert ratio.ratio == pytest.approx(OTHER / AUTO)
    assert ratio.low <= ratio.ratio <= ratio.high
    assert ratio.high / ratio.low == pytest.approx(1.0)


def test_an_interval_is_as_wide_as_its_turns_disagree():
    """Two turns at ratios e^-0.1 and e^0.1: t of one degree, 12.706, times 0.1."""
    ours, theirs = (
        {"turns": [{"seconds": each} for each in seconds], "updates_s": np.cumsum(seconds)}
        for seconds in ([1.0, 1.0], [2.718281828**-0.1, 2.718281828**0.1])
    )
    found = paired(ours, theirs, skip=0)

    assert found.ratio == pytest.approx(1.0)
    assert found.high == pytest.approx(2.718281828**1.2706, rel=1e-3)
    assert paired(ours, theirs) is None


@given(st.floats(1, 60), st.floats(0.1, 120), st.integers(0, 200))
def test_a_turn_ends(until_s, now_s, num_steps):
    """However late its last step was; until then, half of the steps that fit are taken, or one."""
    more = steps_until(until_s, now_s, 0.0, num_steps)
    left = (until_s - now_s) / now_s * num_steps

    assert more >= 0
    assert more <= max(1, left / 2)
    assert not num_steps or (more == 0) == (left <= 0.5)


def test_seconds_to_the_target_are_those_of_the_step_that_reaches_it():
    """An exact contestant takes as many steps as one process does with that seed."""
    ddp, auto, flexrr, asp = standings([EXACT, INEXACT])

    assert auto.to_target_s.values == pytest.approx((30 * AUTO, 32 * AUTO))
    assert flexrr.accuracy.values == (0.95, 0.92)
    assert asp.to_target_s.values == (4.0, 5.0)
    assert asp.to_target_s.mean == 4.5
    assert [one.is_exact for one in (ddp, auto, flexrr, asp)] == [True, True, True, False]
    assert auto.cpu_share == 0.05
    assert auto.late_ms == 3.0


def test_a_seed_that_did_not_come_there_leaves_no_mean():
    """Nor a deviation."""
    assert Spread((1.0, None)).mean is None
    assert Spread((1.0, None)).deviation is None
    assert Spread((1.0, 3.0)).deviation == pytest.approx(2**0.5)


def test_the_bound_is_that_of_the_curves():
    """LBB's own times, with the exchange that was fitted to its saving: 1 / (1 - 0.6457)."""
    assert bound_of(EXACT) == pytest.approx(1 / (1 - 0.6457), rel=1e-4)
