"""How a rank's slowness goes on in time: what a small one looks like among noise."""

import numpy as np
import pytest

from evenstep._diagnosis import Cause

from .runs import names, shown, steps

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
