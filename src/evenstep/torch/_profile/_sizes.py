"""At which sizes a profile measures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ..._planner import Job
from ...exceptions import invalid

NUM_SIZES: Final = 12
SPAN: Final = 4
"""Times the equal share that is measured at most: no worker gets more unless it is that fast."""


def sizes_of(given: Sequence[int] | None, job: Job, *, rank: int, smallest: int) -> list[int]:
    """Return the sizes to measure on ``rank``, ascending.

    By default some twelve, spread evenly in proportion from the smallest to four times the equal
    share, in whole granules, and none above the worker's cap.

    Args:
        given: the user's own; None is the default.
        job: what is planned for.
        rank: this worker.
        smallest: samples that a forward needs.

    Raises:
        ValueError: fewer than two sizes, or some that no rank could run.
    """
    granularity = job.bounds.granularity
    granule = granularity if isinstance(granularity, int) else granularity[rank]
    if given is not None:
        return _checked(given, job, smallest=smallest)
    caps = job.caps()
    by_count = job.bounds.vary == "count"
    cap = job.global_batch_size if caps is None or by_count else int(caps[rank])
    share = -(-job.global_batch_size // job.world_size)
    most = min(SPAN * share, job.global_batch_size, cap) // granule
    least = -(-smallest // granule)
    most = max(most, least + 1)  # two sizes at least, where the batch is that small
    spread = np.geomspace(least, most, NUM_SIZES).round().astype(np.int64)
    sizes: list[int] = (granule * np.unique(spread)).tolist()
    return sizes


def _checked(given: Any, job: Job, *, smallest: int) -> list[int]:
    name = "Balancer.profile(sizes=...)"
    values = given.tolist() if isinstance(given, np.ndarray) else given
    listed = isinstance(values, (list, tuple, range))
    if not listed or any(type(size) is not int or size < smallest for size in values):
        rule = f"be a list of integers of at least {smallest}"
        remedy = "Count whole samples; local BatchNorm needs two."
        raise invalid(name, rule, repr(given)[:60], remedy)
    sizes = sorted(set(values))
    if len(sizes) < 2:
        remedy = "One size shows no curve: add another, best twice the first."
        raise invalid(name, "hold at least two sizes", repr(given)[:60], remedy)
    if job.bounds.vary == "count" and any(size % job.bounds.forward_size for size in sizes):
        rule = f"be multiples of {job.bounds.forward_size} with `Bounds(vary='count')`"
        raise invalid(name, rule, sizes, "Every forward has that many samples.")
    return sizes
