"""What steps that were watched would take with another split, or without the slowest rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, final

import numpy as np

from .._types import Cluster, FloatArray
from ..solve._allocate import allocate
from ..timemodels._affine import AffineTime
from ._watched_steps import OWN_S, WatchedSteps
from ._work_lines import ALIKE, WorkLines

LEAST_STEPS: Final = 20
"""Fewer tell nothing."""

_WARM_UP = 5  # steps: first ones compile, fill caches, build buckets
_FINE = 1 << 20  # samples of a step whose number is not known: so many that rounding is nothing


@final
@dataclass(frozen=True, slots=True)
class SpeedUp:
    """What one change would bring, with the step as it was measured as 1.

    Attributes:
        factor: how many times as fast; None where that cannot be told.
        least: the same if what is not known is as bad as it can be; at most ``factor``.
        reason: why there is no factor, or why it is a bound; empty where there is nothing to say.
    """

    factor: float | None
    least: float | None
    reason: str = ""

    @classmethod
    def untold(cls, reason: str) -> SpeedUp:
        """Return one of which nothing is known."""
        return cls(None, None, reason)


@final
@dataclass(frozen=True, slots=True)
class Counterfactuals:
    """What a step would take otherwise, all with the same global batch.

    Attributes:
        step_s: mean seconds of a step as it was.
        by_speed: each rank gets samples by its speed: ``Balancer()``.
        by_length: each rank gets as much to compute, whatever its speed.
        by_both: by speed and by length: ``Balancer(cost=...)``.
        slowest: the rank that computes for the longest.
        without_slowest: the others share its samples equally.
    """

    step_s: float
    by_speed: SpeedUp
    by_length: SpeedUp
    by_both: SpeedUp
    slowest: int
    without_slowest: SpeedUp

    @property
    def best(self) -> float:
        """The largest factor that ``Balancer`` brings; 1 where none is known."""
        factors = [one.factor for one in (self.by_speed, self.by_both)]
        return max((one for one in factors if one is not None), default=1.0)


def foresee(seen: WatchedSteps) -> Counterfactuals:
    r"""Return what steps would take otherwise.

    A step took $T_k$ and its last rank $m_k = \max_r (t_{kr} + o_{kr})$, with own computing $t$
    and the rank's other own time $o$. With other times $t'$ it takes

    $$T_k' = T_k - m_k + \max_r (t_{kr}' + o_{kr}) + e,$$

    so that all which no split changes stays as it was, and $e$ is what evenstep takes itself, less
    what its loader spares (``WatchedSteps.own_s``; without a rank it spares nothing). With the
    lines of ``WorkLines``, work $x_{kr}$ with the total $X_k$, and $W$ ranks:

    * by speed, with sizes $n_r$ of $B$ from ``allocate`` for every 50 steps:
      $x'_{kr} = X_k n_r / B + (x_{kr} - X_k / W) \sqrt{W n_r / B}$, as samples are drawn as before:
      the deviation of a sum grows with the root of their number;
    * by length: $x'_{kr} = X_k / W$;
    * by both: all end together (``WorkLines.levelled``);
    * without rank $r$: as by speed, with $n_q / B = 1 / (W - 1)$ for the others.

    Speed-ups are $\sum_k T_k / \sum_k T_k'$. The first five steps are left out.

    Right where computing follows the size of a batch in a line, and ranks meet once in a step.
    Samples are taken as divisible: with fewer than four for each rank, single long samples rule,
    and by length and by both are upper bounds. Where batches are padded, ``size`` counts padding,
    of which a split by length saves some: then both are too low.

    Args:
        seen: as training ran.
    """
    if seen.num_steps < LEAST_STEPS + _WARM_UP or seen.world_size < 2:
        return _nothing(seen)
    seen = seen.since(_WARM_UP)
    lines = WorkLines.of(seen)
    slowest = int(np.argmax(seen.compute_s.mean(axis=0)))
    is_told = lines.is_certain or seen.is_slow_throughout
    worst = lines if is_told else lines.of_equal_slopes()
    by_speed = _told(seen, lines, _by_speed(seen, lines), worst, _by_speed(seen, worst))
    by_length = _length_untold(lines)
    by_both = by_speed
    if by_length is None:
        by_length = _told(seen, lines, _by_length(lines))
        by_both = _told(seen, lines, lines.levelled(), worst, worst.levelled())
    return Counterfactuals(
        step_s=float(seen.wall_s.mean()),
        by_speed=by_speed,
        by_length=by_length,
        by_both=by_both,
        slowest=slowest,
        without_slowest=_told(replace(seen, own_s=OWN_S), lines, _without(lines, slowest)),
    )


def _told(
    seen: WatchedSteps,
    lines: WorkLines,
    work: FloatArray,
    worst: WorkLines | None = None,
    worst_work: FloatArray | None = None,
) -> SpeedUp:
    """Return the speed-up with other work, and with the least favourable lines."""
    factor = least = _factor(seen, lines, work)
    if worst is not None and worst is not lines and worst_work is not None:
        least = min(factor, _factor(seen, worst, worst_work))
    reason = ""
    if least < 0.95 * factor:
        reason = "batches were too much alike to tell what a step costs before its first sample"
    return SpeedUp(factor, least, reason)


def _factor(seen: WatchedSteps, lines: WorkLines, work: FloatArray) -> float:
    takes_part = work > 0
    own_s = np.where(takes_part, lines.with_work(work) + seen.other_s, 0.0)
    was_s = (seen.compute_s + seen.other_s).max(axis=1)
    would_s = seen.wall_s - was_s + own_s.max(axis=1) + seen.own_s
    return float(seen.wall_s.sum() / np.maximum(would_s, 1e-9).sum())


def _by_speed(seen: WatchedSteps, lines: WorkLines) -> FloatArray:
    counts = seen.num_samples.sum(axis=1)
    total = int(np.median(counts)) if (counts > 0).all() else _FINE
    cluster = Cluster(seen.world_size, max(total, seen.world_size))
    mean = lines.work.sum(axis=1).mean() / cluster.global_batch_size
    share = np.empty_like(lines.work)
    known: dict[bytes, FloatArray] = {}
    for step, pace in enumerate(lines.pace):
        key = pace.tobytes()
        if key not in known:
            times = AffineTime(pace * lines.intercept_s, pace * lines.slope_s * mean)
            known[key] = allocate(times, cluster) / cluster.global_batch_size
        share[step] = known[key]
    return _shared(lines.work, share)


def _by_length(lines: WorkLines) -> FloatArray:
    return np.broadcast_to(lines.work.mean(axis=1, keepdims=True), lines.work.shape)


def _without(lines: WorkLines, rank: int) -> FloatArray:
    world_size = lines.work.shape[1]
    share = np.full(world_size, 1 / (world_size - 1))
    share[rank] = 0
    return _shared(lines.work, np.broadcast_to(share, lines.work.shape))


def _shared(work: FloatArray, share: FloatArray) -> FloatArray:
    """Return the work of ranks with other shares of the samples, drawn as before."""
    mean = work.mean(axis=1, keepdims=True)
    relative = share * work.shape[1]
    # Of a batch that is one sample, the deviation may be all of it: work is never none.
    drawn: FloatArray = np.maximum(relative * mean + (work - mean) * np.sqrt(relative), 1e-3 * mean)
    return np.where(share > 0, drawn, 0.0)


def _length_untold(lines: WorkLines) -> SpeedUp | None:
    """Return why nothing is said of lengths; None if something is."""
    if not lines.is_size:
        return SpeedUp.untold("the sizes of the batches are not known")
    if lines.spread < ALIKE:
        return SpeedUp(1.0, 1.0, "all samples have the same size")
    return None


def _nothing(seen: WatchedSteps) -> Counterfactuals:
    # A row may be several short steps.
    why = (
        f"only {seen.num_steps} steps (or sums of short ones) were seen, and it takes "
        f"{LEAST_STEPS + _WARM_UP}"
    )
    untold = SpeedUp.untold("there is one rank" if seen.world_size < 2 else why)
    step_s = float(seen.wall_s.mean()) if seen.num_steps else 0.0
    slowest = int(np.argmax(seen.compute_s.mean(axis=0))) if seen.num_steps else 0
    return Counterfactuals(step_s, untold, untold, untold, slowest, untold)
