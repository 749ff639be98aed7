"""Short steps taken together: one of a few milliseconds says little, and a fit takes as long."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from .._types import StepTimings

LEAST_READING_S = 0.02
"""Seconds of computing that make a reading worth the work of learning from it."""

_MOST_STEPS = 64  # of a reading
_LEAST_STEPS = 3  # after a reading of twice as many, so that a pause is no reading by itself


def nothing_gathered(world_size: int, *, num_before: int = 0) -> dict[str, Any]:
    """Return what there is before the first step of a reading: numbers and arrays only.

    Args:
        world_size: number of workers.
        num_before: how many steps the reading before had.
    """
    return {
        "least_steps": _LEAST_STEPS if num_before >= 2 * _LEAST_STEPS else 1,
        "batch_size": np.zeros(world_size, np.int64),
        "compute_s": np.zeros((0, world_size)),
        "data_s": np.zeros((0, world_size)),
    }


def gather(gathered: dict[str, Any], timings: StepTimings) -> dict[str, Any]:
    """Return the steps with one more; this step alone if the sizes have changed."""
    if not np.array_equal(gathered["batch_size"], timings.batch_size):
        least_steps = gathered["least_steps"]
        gathered = {**nothing_gathered(len(timings.batch_size)), "least_steps": least_steps}
    compute_s = np.where(timings.batch_size > 0, timings.compute_s, 0.0)
    return {
        "least_steps": gathered["least_steps"],
        "batch_size": timings.batch_size,
        "compute_s": np.vstack((gathered["compute_s"], compute_s)),
        "data_s": np.vstack((gathered["data_s"], timings.data_s)),
    }


def num_steps_of(gathered: dict[str, Any]) -> int:
    """Return how many steps there are."""
    return len(gathered["compute_s"])


def num_steps_left(gathered: dict[str, Any], least_s: float) -> int:
    """Return how many more steps like these make a reading of about ``least_s``."""
    step_s = float(np.median(gathered["compute_s"].max(axis=1)))
    needed = min(round(least_s / max(step_s, 1e-9)), _MOST_STEPS)
    least_steps: int = gathered["least_steps"]
    return max(0, max(needed, least_steps) - num_steps_of(gathered))


def typical_step(gathered: dict[str, Any], newest: StepTimings) -> StepTimings:
    """Return every worker's median, which pauses of the machine leave alone.

    What else is known is as in the newest step.
    """
    if num_steps_of(gathered) == 1:
        return newest
    return replace(
        newest,
        compute_s=np.median(gathered["compute_s"], axis=0),
        data_s=np.median(gathered["data_s"], axis=0),
    )
