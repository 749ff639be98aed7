"""How many samples each worker gets: in proportion, or the exact split that finishes earliest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

import numpy as np

from .._types import Cluster, FloatArray, IntArray
from ..exceptions import invalid
from ..timemodels import AbstractTimeModel


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


# Every so many probes the bracket is halved, whatever the chords say: it bounds the search on
# plateaus and jumps. Rarely reached on straight lines, which take three to six probes.
HALVE_EVERY = 4


def allocate(times: AbstractTimeModel, cluster: Cluster) -> IntArray:
    r"""Split the global batch so that the last worker finishes as early as possible.

    Minimises $\max_r t_r(b_r)$ over integers with $\sum_r b_r = B$ and
    $l_r \le b_r \le u_r$, each $b_r$ a multiple of its worker's granularity but for one, which
    may carry the remainder. Exact for every model whose times never fall, plateaus and jumps
    included: within a time $T$ the workers hold $\sum_r G_r + \max_r (P_r - G_r)$ samples, with
    $P_r$ the largest size that takes no longer and $G_r$ its whole granules. The answer is
    level with the smallest $T$ that holds $B$. The search takes Newton steps along the chords of
    the curves between bounds, halves the bracket where those do not help, and ends on a value
    that some $t_r(b)$ takes, with nothing left below it.

    Of several splits as good it returns one: all get what fits strictly below the level, and the
    workers tied on it share what is left evenly, granule by granule, the lower rank first. So
    equal workers differ by one granule at most, and a worker kept busy by its own lower bound
    leaves the others balanced among themselves.

    The answer is as good as the times. It knows nothing of their noise, of communication, or of
    what it costs to change batch sizes: policies do.

    Args:
        times: how long each worker takes for any size, for ``cluster.world_size`` workers.
        cluster: the global batch, bounds and granularity. With a smallest batch of 0, a worker
            whose fixed cost is past the level is given nothing.

    Returns:
        Local batch sizes, ``(world_size,)``, summing to ``cluster.global_batch_size``.

    Raises:
        ValueError: ``times`` speaks of another number of workers, or is not finite within the
            bounds. Bounds that cannot be met are refused by ``Cluster`` itself.

    References:
        T. Ibaraki and N. Katoh, *Resource Allocation Problems*, MIT Press, 1988 (the min-max
        problem with separable objective). The canonical split, granularity and the search on
        attained values are ours.
    """
    check_world("allocate(times=...)", times, cluster)
    lo = cluster.min_batch_size
    if int(lo.sum()) == cluster.global_batch_size:
        return lo.copy()
    below, level = _search(times, cluster)
    return _deal_out(times, cluster, below=below, level=level)


def makespan_s(times: AbstractTimeModel, batch_size: IntArray) -> float:
    """Return the time of the slowest worker, in seconds."""
    return float(times.seconds(batch_size).max())


def ends_within(times: AbstractTimeModel, cluster: Cluster, budget_s: float) -> bool:
    """Say whether any split at all takes no longer than ``budget_s``.

    As exact as ``allocate``, for the price of one of its probes.
    """
    fit = _fit(times, cluster, budget_s)
    return fit.surplus >= 0 and makespan_s(times, cluster.min_batch_size) <= budget_s


@dataclass(frozen=True, slots=True, eq=False)
class _Fit:
    """What the workers hold within a time, their lower bounds taken for granted."""

    budget_s: float
    largest: IntArray
    whole: IntArray
    surplus: int  # samples held past the global batch; negative where it does not fit


def _fit(times: AbstractTimeModel, cluster: Cluster, budget_s: float) -> _Fit:
    largest = times.largest_batch(budget_s, cluster.max_batch_size)
    return _holding(cluster, budget_s, np.maximum(largest, cluster.min_batch_size))


def _holding(cluster: Cluster, budget_s: float, largest: IntArray) -> _Fit:
    part = largest % cluster.granularity
    whole = largest - part
    surplus = int(whole.sum()) + int(part.max()) - cluster.global_batch_size
    return _Fit(budget_s, largest, whole, surplus)


def _search(times: AbstractTimeModel, cluster: Cluster) -> tuple[_Fit, _Fit]:
    """Return the fits strictly below and at the smallest time that holds the global batch.

    The bracket only ever ends on values that some worker takes: what the workers hold changes
    nowhere else. So each probe either lowers its top or raises its bottom by a value at least,
    and no tolerance is needed.
    """
    lo, hi = cluster.min_batch_size, cluster.max_batch_size
    first = np.minimum(np.maximum(lo, 1), hi)
    first_s, last_s = times.seconds(first), times.seconds(hi)
    _check_finite(first_s, last_s)
    rate, guess = _chords(cluster, first, first_s, last_s - first_s)

    below = _Fit(-1.0, lo, lo, int(lo.sum()) - cluster.global_batch_size)
    level = _holding(cluster, float(last_s.max()), hi)
    bottom_s, top_s = _next_s(times, cluster, below), _last_s(times, cluster, level)
    num_probes = 0
    while bottom_s < top_s:
        num_probes += 1
        halve = num_probes % HALVE_EVERY == 0 or not math.isfinite(guess)
        wanted = bottom_s + 0.5 * (top_s - bottom_s) if halve else guess
        probe = _fit(times, cluster, min(max(wanted, bottom_s), math.nextafter(top_s, 0.0)))
        if probe.surplus < 0:
            below, bottom_s = probe, _next_s(times, cluster, probe)
        else:
            level, top_s = probe, _last_s(times, cluster, probe)
        moving = float(rate[(probe.largest > lo) & (probe.largest < hi)].sum())
        from_s = probe.budget_s if probe.surplus < 0 else top_s
        guess = from_s - probe.surplus / moving if moving > 0 else math.nan
    return below, level


def _chords(
    cluster: Cluster, first: IntArray, first_s: FloatArray, rise_s: FloatArray
) -> tuple[FloatArray, float]:
    """Return samples per second along chords over the bounds, and the time that they ask for.

    The time is not finite where the chords say nothing; the search then starts by halving.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        samples = cluster.max_batch_size - first
        rate = np.divide(samples, rise_s, out=np.zeros(len(first)), where=rise_s > 0)
        total = cluster.global_batch_size + float((first_s * rate - first).sum())
    all_rates = float(rate.sum())
    return rate, total / all_rates if all_rates > 0 else math.nan


def _next_s(times: AbstractTimeModel, cluster: Cluster, fit: _Fit) -> float:
    """Return the first time past the fit's at which any worker holds more."""
    open_ = fit.largest < cluster.max_batch_size
    return float(times.seconds(fit.largest + open_)[open_].min(initial=math.inf))


def _last_s(times: AbstractTimeModel, cluster: Cluster, fit: _Fit) -> float:
    """Return the first time from which on the workers hold what they hold in the fit."""
    moved = fit.largest > cluster.min_batch_size
    return float(times.seconds(fit.largest)[moved].max(initial=0.0))


def _deal_out(times: AbstractTimeModel, cluster: Cluster, *, below: _Fit, level: _Fit) -> IntArray:
    """Give what fits below the level, then level the rest among those tied on it."""
    granule = cluster.granularity
    room = (level.whole - below.whole) // granule
    left = cluster.global_batch_size - int(below.whole.sum())
    if left >= int((room * granule).sum()):
        left = cluster.global_batch_size - int(level.whole.sum())
        return _add_part(times, level, left) if left else level.whole

    rounds, above = 0, int(room.max())
    while above - rounds > 1:
        mid = (rounds + above) // 2
        fits = int((np.minimum(room, mid) * granule).sum()) <= left
        rounds, above = (mid, above) if fits else (rounds, mid)
    given = np.minimum(room, rounds) * granule
    left -= int(given.sum())
    last = np.where(room > rounds, granule, 0)
    allocation: IntArray = below.whole + given + np.clip(left - (np.cumsum(last) - last), 0, last)
    return allocation


def _add_part(times: AbstractTimeModel, level: _Fit, left: int) -> IntArray:
    """Add what is less than a granule where it finishes first."""
    able = level.largest - level.whole >= left
    with_part = level.whole + np.where(able, left, 0)
    rank = int(np.where(able, times.seconds(with_part), math.inf).argmin())
    allocation = level.whole.copy()
    allocation[rank] += left
    return allocation


def check_world(argument: str, times: AbstractTimeModel, cluster: Cluster) -> None:
    """Raise unless a time model speaks of as many workers as the cluster has."""
    if times.world_size != cluster.world_size:
        rule = f"speak of the cluster's {cluster.world_size} workers"
        raise invalid(argument, rule, times.world_size, "Give the times of each worker.")


def _check_finite(first_s: FloatArray, last_s: FloatArray) -> None:
    finite = np.isfinite(first_s) & np.isfinite(last_s) & (last_s >= first_s)
    if not finite.all():
        rank = int(np.argmin(finite))
        raise invalid(
            "allocate(times=...)",
            "be finite and nondecreasing within the bounds",
            f"{first_s[rank]} s at the smallest and {last_s[rank]} s at the largest batch of "
            f"rank {rank}",
            "Cap what does not fit with `max_batch_size`, and leave out what was not measured.",
        )
