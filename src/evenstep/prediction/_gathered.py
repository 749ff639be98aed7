"""Short steps taken together: one of a few milliseconds says little, and a fit takes as long."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from .._types import StepTimings

LEAST_READING_S = 0.05
"""Seconds of computing that make a reading worth the work of learning from it."""

_MOST_STEPS = 64  # of a reading


def nothing_gathered(world_size: int) -> dict[str, Any]:
    """Return what there is before the first step: numbers and arrays only."""
    return {
        "sum_s": 0.0,  # of the slowest worker of each step
        "batch_size": np.zeros(world_size, np.int64),
        "compute_s": np.zeros((0, world_size)),
        "data_s": np.zeros((0, world_size)),
    }


def gather(gathered: dict[str, Any], timings: StepTimings) -> dict[str, Any]:
    """Return the steps with one more; this step alone if the sizes have changed."""
    if not np.array_equal(gathered["batch_size"], timings.batch_size):
        gathered = nothing_gathered(len(timings.batch_size))
    compute_s = np.where(timings.batch_size > 0, timings.compute_s, 0.0)
    return {
        "sum_s": gathered["sum_s"] + float(compute_s.max()),
        "batch_size": timings.batch_size,
        "compute_s": np.vstack((gathered["compute_s"], compute_s)),
        "data_s": np.vstack((gathered["data_s"], timings.data_s)),
    }


def num_steps_left(gathered: dict[str, Any], least_s: float) -> int:
    """Return how many more steps like these make a reading of about ``least_s``."""
    num_steps = len(gathered["compute_s"])
    sum_s: float = gathered["sum_s"]
    left_s = max(0.0, least_s - sum_s)
    return min(round(left_s * num_steps / max(sum_s, 1e-9)), _MOST_STEPS - num_steps)


def typical_step(gathered: dict[str, Any], newest: StepTimings) -> StepTimings:
    """Return every worker's median, which pauses of the machine leave alone.

    What else is known is as in the newest step.
    """
    if len(gathered["compute_s"]) == 1:
        return newest
    return replace(
        newest,
        compute_s=np.median(gathered["compute_s"], axis=0),
        data_s=np.median(gathered["data_s"], axis=0),
    )
