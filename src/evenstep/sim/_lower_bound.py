"""The earliest end of a step of samples with unlike costs, on workers with unlike speeds."""

from __future__ import annotations

import numpy as np

from .._types import FloatArray, IntArray
from ..timemodels._cost_model import CostModel

_MOST_STATES = 1 << 14  # numbers of workers of each kind that are looked at
_FINE = 1e-4  # relative error of the earliest end


def lower_bound_s(
    cost: FloatArray, intercept_s: FloatArray, slope_s: FloatArray, *, padded: bool
) -> tuple[float, str]:
    r"""Return a time before which no assignment ends, and what it comes from.

    Worker $r$ ends at $a_r + s_r \sum_i c_i$; with ``padded``, at $a_r + s_r n \max_i c_i$. One
    without samples takes no part.

    - ``"work"``: all workers end together, if samples could be cut anywhere.
    - ``"sample"``: the most expensive sample on its best worker.
    - ``"runs"``: the sorted samples in the best runs, where samples are padded. That is the best
      assignment there is, as no exchange of two samples between runs shortens the longest of both.
      With more than about 14 kinds of workers it is not looked for, and padding is left out.

    Args:
        cost: of every sample, at least 0, ``(num_samples,)``.
        intercept_s: $a$, ``(world_size,)``.
        slope_s: $s$, positive, ``(world_size,)``.
        padded: whether each sample takes as long as the longest of its worker.
    """
    level_s = CostModel(intercept_s, slope_s[:, None]).level_s([cost.sum()])
    sample_s = float((intercept_s + slope_s * cost.max()).min())
    bound = (level_s, "work") if level_s >= sample_s else (sample_s, "sample")
    if not padded:
        return bound
    found_s = best_runs_s(cost, intercept_s, slope_s, at_least_s=bound[0])
    return bound if found_s is None else (found_s, "runs")


def best_runs_s(
    cost: FloatArray, intercept_s: FloatArray, slope_s: FloatArray, *, at_least_s: float
) -> float | None:
    """Return the earliest end over all runs of the sorted samples and all orders of the workers.

    Exact, by the number of workers of each kind that have had their run: of those, the furthest
    sample that is dealt out by a given time. Never later than the earliest end, and at most 1 part
    in 10,000 earlier. None where there are too many kinds.

    Args:
        cost, intercept_s, slope_s: as above.
        at_least_s: a bound that is known, positive.
    """
    kinds, counts = np.unique(np.stack([intercept_s, slope_s]), axis=1, return_counts=True)
    if np.prod(counts + 1.0) > _MOST_STATES:
        return None
    cost = np.maximum(np.sort(cost)[::-1], 1e-300)
    low, high = at_least_s, at_least_s
    while not _suffices(cost, kinds, counts, high):
        low, high = high, 2 * high
    while high - low > _FINE * high:
        middle = (low + high) / 2
        if _suffices(cost, kinds, counts, middle):
            high = middle
        else:
            low = middle
    return low


def _suffices(cost: FloatArray, kinds: FloatArray, counts: IntArray, end_s: float) -> bool:
    """Return whether all samples can be done by ``end_s``."""
    num_samples = len(cost)
    places = np.arange(num_samples)
    room = np.maximum(end_s - kinds[0], 0)[:, None] / kinds[1][:, None] / cost
    reached = places + np.minimum(room, num_samples).astype(np.int64)
    after = np.append(reached, np.full((len(counts), 1), num_samples), axis=1).clip(max=num_samples)
    furthest = np.zeros(counts + 1, np.int64)
    for _ in range(int(counts.sum())):
        for kind in range(len(counts)):
            more = np.moveaxis(furthest, kind, 0)
            np.maximum(more[1:], after[kind][more[:-1]], out=more[1:])
    return int(furthest[tuple(counts)]) >= num_samples
