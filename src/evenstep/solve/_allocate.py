"""The exact integer split of a global batch that finishes earliest."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .._types import Cluster, FloatArray, IntArray
from ..exceptions import invalid
from ..timemodels import AbstractTimeModel

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
    _check_world(times, cluster)
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


def _check_world(times: AbstractTimeModel, cluster: Cluster) -> None:
    if times.world_size != cluster.world_size:
        raise invalid(
            "allocate(times=...)",
            f"speak of the cluster's {cluster.world_size} workers",
            times.world_size,
            "Give one row of costs per worker.",
        )


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
