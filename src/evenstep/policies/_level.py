"""Splits at which all workers end together, in fractions of samples, for many forecasts at once."""

from __future__ import annotations

import numpy as np

from .._types import Cluster, FloatArray


def level_splits(intercept_s: FloatArray, slope_s: FloatArray, cluster: Cluster) -> FloatArray:
    r"""Return the split that ends earliest under each forecast, not yet whole.

    $b_r = (T - a_r) / c_r$ with $T = (B + \sum a_r / c_r) / \sum 1 / c_r$ over the workers at no
    bound. Workers that violate one are pinned there and the rest is solved again, each time on
    the side that is violated more: what is pinned so stays pinned at the optimum.

    Args:
        intercept_s: fixed costs, the same in all forecasts, ``(world_size,)``.
        slope_s: cost of a sample, positive, ``(num_forecasts, world_size)``.
        cluster: supplies the total and the bounds; granules are left to who rounds.

    Returns:
        Sizes that add up to the global batch, ``(num_forecasts, world_size)``.

    References:
        The pinning is that of G. Bitran and A. Hax, *Management Science* 27, 1981.
    """
    lo, hi = cluster.min_batch_size, cluster.max_batch_size
    speed = 1 / slope_s
    split, free = np.zeros_like(speed), np.ones(speed.shape, np.bool_)
    left = np.full((len(speed), 1), float(cluster.global_batch_size))
    while True:
        rate = np.where(free, speed, 0.0)
        total = rate.sum(axis=1, keepdims=True)
        end_s = (left + (rate * intercept_s).sum(axis=1, keepdims=True)) / np.maximum(total, 1e-300)
        wanted = (end_s - intercept_s) * rate
        below, above = free & (wanted < lo), free & (wanted > hi)
        if not (below.any() or above.any()):
            return np.where(free, wanted, split)
        short = np.where(below, lo - wanted, 0.0).sum(axis=1, keepdims=True)
        over = np.where(above, wanted - hi, 0.0).sum(axis=1, keepdims=True)
        pinned = np.where(short >= over, below, above)
        split = np.where(pinned, np.where(below, lo, hi), split)
        left = left - np.where(pinned, split, 0.0).sum(axis=1, keepdims=True)
        free &= ~pinned
