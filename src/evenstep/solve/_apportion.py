"""Integers that add up exactly: shares by largest remainder, and a batch cut into forwards."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace

import numpy as np

from .._types import Cluster, FloatArray, IntArray


def apportion(shares: FloatArray, cluster: Cluster) -> IntArray:
    """Split the global batch in proportion to ``shares``, within worker bounds.

    The common multiplier is the one at which the clipped shares sum to the global batch, read off
    their piecewise linear sum between its corners; the result is rounded to whole granules by
    largest remainder. The last worker to be rounded up takes what is left, be it less than a
    granule. Ties go to the lower rank, so equal inputs give equal outputs.

    Args:
        shares: non-negative weights, not all zero, ``(world_size,)``. Only ratios matter; one
            below 1e-12 of the largest counts as 1e-12.
        cluster: supplies the total, the per-worker bounds and the granularity.

    Returns:
        Local batch sizes, ``(world_size,)``, summing to ``cluster.global_batch_size``.

    References:
        M. Balinski and H. P. Young, *Fair Representation*, 1982 (Hamilton's method).
    """
    lo, hi, total = cluster.min_batch_size, cluster.max_batch_size, cluster.global_batch_size
    weights = np.maximum(shares / shares.max(), 1e-12)

    exact: FloatArray = np.clip(_multiplier(weights, lo, hi, total) * weights, lo, hi)
    granules = exact / cluster.granularity
    whole = np.floor(granules + 1e-9)
    allocation = whole.astype(np.int64) * cluster.granularity

    # Past `hi` there is no room, whatever the remainder says. Rounded, because equal workers
    # differ in a float's last bit.
    remainder = np.where(allocation < hi, granules - whole, -1.0).round(9)
    order = np.argsort(-remainder, kind="stable")
    step = cluster.granularity[order]
    left = total - int(allocation.sum())
    allocation[order] += np.clip(left - (np.cumsum(step) - step), 0, step)
    return allocation


def in_proportion(total: int, weights: Sequence[int]) -> IntArray:
    """Split ``total`` in proportion to ``weights``, without bounds and in integers alone.

    Every rank that holds the same weights finds the same split, whatever its CPU: nothing has to
    be sent. Where ``total`` is at most the sum of the weights, no rank gets more than its weight.

    Args:
        total: what to split, at least 0.
        weights: at least 0 each, not all 0, ``(world_size,)``.

    Returns:
        Shares that add up to ``total``, ``(world_size,)``; ties go to the lower rank.
    """
    whole = sum(weights)
    floors = [total * weight // whole for weight in weights]
    rests = [total * weight % whole for weight in weights]
    for rank in sorted(range(len(weights)), key=lambda rank: -rests[rank])[: total - sum(floors)]:
        floors[rank] += 1
    return np.array(floors, np.int64)


def scaled(num_samples: int, sizes: Sequence[int], most: Sequence[int] | None = None) -> IntArray:
    r"""Return the sizes of a step of another number of samples than ``sizes`` add up to.

    Ranks that have samples get one each, the largest first. Each further sample goes to the rank
    whose part is the smallest with it, by $(n_r + 1) / b_r$: that keeps $\max_r n_r / b_r$ least.
    So no rank gets fewer where there are more samples, and ``sizes`` come back for their own sum.
    Ties go to the lower rank. A quotient of integers is the same on every CPU, so nothing has to
    be sent.

    Args:
        num_samples: what to split, at least 0.
        sizes: planned, at least 0 each, not all 0, ``(world_size,)``.
        most: samples for each rank; where they leave no way, they do not bind. None is no limit.

    Returns:
        Sizes that add up to ``num_samples``, ``(world_size,)``.

    References:
        M. Balinski and H. P. Young, *Fair Representation*, 1982 (Jefferson's method).
    """
    planned = np.array(sizes, np.int64)
    found, ranks, left = np.zeros_like(planned), np.flatnonzero(planned), num_samples
    caps = np.full_like(planned, num_samples) if most is None else np.array(most, np.int64)
    if caps[ranks].sum() < num_samples:
        caps = np.full_like(planned, num_samples)
    while left:
        part = _by_least_part(left, planned[ranks])
        is_over = part > caps[ranks]
        found[ranks] = np.minimum(part, caps[ranks])
        if not is_over.any():
            break
        left -= int(caps[ranks[is_over]].sum())
        ranks = ranks[~is_over]
    return found


def _by_least_part(num_samples: int, planned: IntArray) -> IntArray:
    """Return how ``num_samples`` are split over ranks that all have samples, without caps."""
    num_ranks = len(planned)
    if num_samples < num_ranks:
        planned = planned.copy()
        order = np.argsort(-planned, kind="stable")
        planned[order[:num_samples]], planned[order[num_samples:]] = 1, 0
        return planned
    # Without the first one each, no rank has less than the whole part of its quota.
    found: IntArray = np.maximum((num_samples - num_ranks) * planned // planned.sum(), 1)
    queue = [((found[rank] + 1) / planned[rank], rank) for rank in range(num_ranks)]
    heapify(queue)
    for _ in range(num_samples - int(found.sum())):
        rank = queue[0][1]
        found[rank] += 1
        heapreplace(queue, ((found[rank] + 1) / planned[rank], rank))
    return found


def _multiplier(weights: FloatArray, lo: IntArray, hi: IntArray, total: int) -> float:
    """Return the scale at which ``clip(scale * weights, lo, hi)`` sums to ``total``."""
    corners = np.concatenate([lo / weights, hi / weights])
    order = np.argsort(corners, kind="stable")
    corners = corners[order]
    # Between two corners the sum grows by the weights of those that are at neither bound.
    slopes = np.cumsum(np.concatenate([weights, -weights])[order])
    sums = lo.sum() + np.concatenate([[0.0], np.cumsum(slopes[:-1] * np.diff(corners))])
    before = int(np.searchsorted(sums, total, side="left")) - 1
    if before < 0:
        return float(corners[0])
    missing = total - sums[before]
    if slopes[before] < 0.5e-12:  # below any weight: all are at a bound, rounding left a crumb
        return float(corners[min(before + 1, len(corners) - 1)])
    return float(corners[before] + missing / slopes[before])


def cut(
    num_samples: int, max_forward: int | None, granularity: int = 1, *, fewest: int = 1
) -> tuple[int, ...]:
    """Return the sizes of as few micro-batches as ``max_forward`` allows, equal within a granule.

    All are whole granules, except that the last carries what is left of one. With both numbers
    the same, every micro-batch has that one size. Where there are fewer samples than micro-batches,
    the first ones have none.

    Args:
        num_samples: samples of a rank in a step, at least 0.
        max_forward: most samples in one forward, positive; None is no limit.
        granularity: samples that come and go together, positive. One that does not fit into a
            forward is given up, as is one of which there are fewer than ``fewest``.
        fewest: micro-batches there are at least, positive.
    """
    fits = max_forward is None or num_samples <= max_forward
    if fits and fewest == 1:
        return (num_samples,)
    most = num_samples if max_forward is None else max_forward
    granule = granularity if granularity <= min(most, num_samples // fewest) else 1
    num_granules = -(-num_samples // granule)
    num_parts = max(1 if fits else -(-num_granules // (most // granule)), fewest)
    small, larger = divmod(num_granules, num_parts)
    if not small:
        return (0,) * (num_parts - larger) + (1,) * larger
    sizes = [granule * (small + 1)] * larger + [granule * small] * (num_parts - larger)
    sizes[-1] -= num_granules * granule - num_samples
    return tuple(sizes)


def cut_by_size(sizes: Sequence[int], max_size: int, least: int = 1) -> tuple[int, ...]:
    """Return how many of the samples each micro-batch gets, one after the other.

    None is larger than ``max_size``, but for one of ``least`` samples. The last may have fewer.

    Args:
        sizes: of the samples, such as their tokens.
        max_size: most of it in one forward.
        least: samples that one forward needs, positive.
    """
    counts, held = [0], 0
    for size in sizes:
        if held + size > max_size and counts[-1] >= least:
            counts.append(0)
            held = 0
        counts[-1] += 1
        held += size
    return tuple(counts)
