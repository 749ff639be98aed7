"""What steps that were watched would take with another split, or without the slowest rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Self, final

import numpy as np
from numpy.typing import ArrayLike

from .._diagnosis import Phase
from .._types import Cluster, FloatArray
from ..solve._allocate import allocate
from ..timemodels._cost_model import CostModel, fit_costs
from ..timemodels._curves import AffineTime

OWN_S: Final = 0.0004
"""Of the training thread, for each step with a Balancer."""
_OWN = (Phase.INPUT, Phase.OPTIMIZER, Phase.EVALUATION, Phase.CHECKPOINT, Phase.REST)
_LEAST_SHARE = 0.1  # of computing, for a phase that shows something
_ONE_FACTOR = 1.25  # by which ratios of forward to backward differ at most


@final
@dataclass(frozen=True, slots=True, eq=False)
class WatchedSteps:
    """Times and batches of all ranks in steps whose split was the user's own.

    Attributes:
        wall_s: seconds of each step, ``(num_steps,)``.
        compute_s: own forward and backward of each rank, without waiting for others,
            ``(num_steps, world_size)``, positive.
        other_s: a rank's other own time, which its number of samples does not change: input,
            optimizer, the rest of the loop; likewise.
        num_samples: of each rank's batch; likewise, 0 where that is not known.
        size: numbers or tokens in it; likewise.
        is_slow_throughout: whether forward and backward of slow ranks are slower by one factor, as
            with a slow device. Then so is what a step costs before its first sample.
        own_s: what a balanced step takes beside: evenstep's own time and what further forwards meet
            for, less what its loader spares.
    """

    wall_s: FloatArray
    compute_s: FloatArray
    other_s: FloatArray
    num_samples: FloatArray
    size: FloatArray
    is_slow_throughout: bool = False
    own_s: float = OWN_S

    @classmethod
    def of(
        cls,
        spent_us: ArrayLike,
        *,
        num_steps: ArrayLike = 1,
        num_samples: ArrayLike = 0,
        size: ArrayLike = 0,
        own_s: float = OWN_S,
    ) -> Self:
        """Return what times by phase say of steps.

        Evaluation and checkpoints count as a rank's other time. Of short steps that were summed up
        in one row, their mean counts as a step.

        Args:
            spent_us: as ``time_by_phase`` gives them, ``(num_rows, world_size, len(Phase))``.
            num_steps: how many steps each row is the sum of, ``(num_rows,)``.
            num_samples: of each rank's batch, ``(num_rows, world_size)``; 0 where not known.
            size: numbers or tokens in it; likewise.
            own_s: what a balanced step takes beside.
        """
        spent_s = np.asarray(spent_us, np.float64) / 1e6
        each = np.broadcast_to(num_steps, spent_s.shape[:1])[:, None]
        spent_s = spent_s / each[..., None]
        forward_s, backward_s = spent_s[..., Phase.FORWARD], spent_s[..., Phase.BACKWARD]
        compute_s = forward_s + backward_s
        return cls(
            wall_s=spent_s.sum(axis=2).mean(axis=1),
            compute_s=np.maximum(compute_s, 1e-6),
            other_s=spent_s[..., _OWN].sum(axis=2),
            num_samples=np.broadcast_to(num_samples, compute_s.shape) / each,
            size=np.broadcast_to(size, compute_s.shape) / each,
            is_slow_throughout=_alike(forward_s, backward_s),
            own_s=own_s,
        )

    @property
    def num_steps(self) -> int:
        """How many there are."""
        return len(self.wall_s)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return int(self.compute_s.shape[1])

    def since(self, first: int) -> WatchedSteps:
        """Return those from the step at this place on."""
        return WatchedSteps(
            self.wall_s[first:],
            self.compute_s[first:],
            self.other_s[first:],
            self.num_samples[first:],
            self.size[first:],
            self.is_slow_throughout,
            self.own_s,
        )


def _alike(forward_s: FloatArray, backward_s: FloatArray) -> bool:
    """Return whether the forward has one share of computing on all ranks, neither all nor none."""
    forward, backward = np.median(forward_s, axis=0), np.median(backward_s, axis=0)
    share = forward / np.maximum(forward + backward, 1e-9)
    return bool(share.min() > _LEAST_SHARE and share.max() < 1 - _LEAST_SHARE) and bool(
        np.ptp(np.log(share / (1 - share))) < np.log(_ONE_FACTOR)
    )


ALIKE: Final = 0.01  # relative deviation of the work, below which batches count as alike
_CERTAIN = 0.1  # of a rank's time: the error of its fixed part, past which the fit is not used
_CONVEX = 0.1  # of the time: the quadratic part that is more than noise
_BLOCK = 50  # steps in which a rank keeps its pace


@final
@dataclass(frozen=True, slots=True, eq=False)
class WorkLines:
    r"""Own times $t_{kr} = p_{kr} \, \ell_{kr} \, (a_r + s_r x_{kr})$ of rank $r$ in step $k$.

    $x$ is its work: $z + q z^2 / n$ from the size $z$ of its batch of $n$ samples, as attention
    has it where batches are padded, or the number of samples where sizes are not known. The pace
    $p$ is the median of what is left in 50 steps, so it follows a rank that gets slower. Luck
    $\ell$ is the rest. If the quadratic part is more than a tenth of the time, a few long samples
    cost more than many short ones of the same size; then luck counts as work.

    Attributes:
        work: $x$, ``(num_steps, world_size)``.
        intercept_s: $a$, ``(world_size,)``.
        slope_s: $s$, likewise.
        pace: $p$, ``(num_steps, world_size)``.
        luck: likewise.
        is_size: whether work comes from sizes.
        is_certain: whether $a$ and $s$ could be separated by the work. If not, all of the time is
            taken for work.
    """

    work: FloatArray
    intercept_s: FloatArray
    slope_s: FloatArray
    pace: FloatArray
    luck: FloatArray
    is_size: bool
    is_certain: bool

    @classmethod
    def of(cls, seen: WatchedSteps) -> WorkLines:
        r"""Return the lines of ranks as they were seen.

        In plain training every rank has as many samples in nearly every step. So the fixed part
        $a_r$ is known where sizes differ enough: where the standard error of $s_r \bar x_r$ is at
        most a tenth of the rank's time, on every rank. Otherwise $a_r = 0$. What follows from it is
        right whenever slow ranks are slower in the fixed part too: from $t_r = v_r (a + s x_r)$
        follows that all end together at $(W a + s \sum_r x_r) / \sum_r 1 / v_r$, which depends on
        the sum of fixed and other parts only, as long as no fixed part outlasts the step.
        """
        is_size = bool((seen.size > 0).all())
        took = seen.compute_s
        work, is_convex = _work(seen) if is_size else (np.maximum(seen.num_samples, 1.0), False)
        fit = fit_costs(work[..., None], took, [0] * seen.world_size)
        is_certain = _error(fit, work, took) <= _CERTAIN
        if not is_certain:
            proportional = np.median(took, axis=0) / np.median(work, axis=0)
            fit = CostModel(np.zeros(seen.world_size), proportional[:, None])
        lines = _paced(fit, work, took, is_size=is_size, is_certain=is_certain)
        return lines.without_luck() if is_certain and is_convex else lines

    def of_equal_slopes(self) -> WorkLines:
        """Return the other extreme of what is not known: slow ranks are slower in ``a`` alone.

        As one that does something of fixed length in every step. Then its samples help others
        less when they go.
        """
        typical = np.median(self.work, axis=0)
        seconds = self.intercept_s + self.slope_s * typical
        slope = np.full_like(seconds, (seconds / typical).min())
        fit = CostModel(np.maximum(seconds - slope * typical, 0.0), slope[:, None])
        return _paced(fit, self.work, self.took_s, is_size=self.is_size, is_certain=False)

    def without_luck(self) -> WorkLines:
        """Return them with work that explains all of the times."""
        seconds = self.took_s / self.pace
        work = np.maximum((seconds - self.intercept_s) / self.slope_s, 1e-3 * self.work)
        return replace(self, work=work, luck=np.ones_like(work))

    @property
    def took_s(self) -> FloatArray:
        """Own times, as they were, ``(num_steps, world_size)``."""
        return self.with_work(self.work)

    def with_work(self, work: FloatArray) -> FloatArray:
        r"""Return own times with other work in the same steps; none for a rank without.

        Whatever befell a rank in a step would have befallen it with any work.
        """
        seconds: FloatArray = self.pace * self.luck * (self.intercept_s + self.slope_s * work)
        return np.where(work > 0, seconds, 0.0)

    def levelled(self) -> FloatArray:
        r"""Return the work of ranks that all end together, by what is known before the step.

        $x_{kr} = \max(0, (T_k / p_{kr} - a_r) / s_r)$ with $\sum_r x_{kr}$ as it was.
        """
        start, cost = self.pace * self.intercept_s, self.pace * self.slope_s
        total = self.work.sum(axis=1, keepdims=True)
        order = np.argsort(start, axis=1)
        start_up = np.take_along_axis(start, order, axis=1)
        cost_up = np.take_along_axis(cost, order, axis=1)
        ready = (total + np.cumsum(start_up / cost_up, axis=1)) / np.cumsum(1 / cost_up, axis=1)
        # The last rank to take part is the last that starts before the level of those up to it.
        last = (ready > start_up).sum(axis=1, keepdims=True) - 1
        level = np.take_along_axis(ready, last, axis=1)
        work: FloatArray = np.maximum((level - start) / cost, 0.0)
        return work


def spread_of(values: FloatArray) -> float:
    """Return the relative deviation of a column as medians see it; the median of all columns."""
    usual = np.median(values, axis=0)
    return float(np.median(1.4826 * np.median(abs(values - usual), axis=0) / usual))


def _work(seen: WatchedSteps) -> tuple[FloatArray, bool]:
    """Return the work of sizes, and whether a good part of it is quadratic."""
    size, num = seen.size, seen.num_samples
    # Tokens in one row have as many "samples": how many there are is not known then.
    is_known = (num > 0).all() and spread_of(num) < ALIKE
    features = np.stack([size, size**2 / (num if is_known else 1.0)], axis=2)
    fit = fit_costs(features, seen.compute_s, [0] * seen.world_size)
    linear, quadratic = fit.slope_s.sum(axis=0) / fit.slope_s.sum()
    work = linear * features[..., 0] + quadratic * features[..., 1]
    curved = np.median(fit.slope_s[:, 1] * features[..., 1] / seen.compute_s)
    return (work, True) if curved > _CONVEX else (size, False)


def _paced(
    fit: CostModel, work: FloatArray, took: FloatArray, *, is_size: bool, is_certain: bool
) -> WorkLines:
    left = took / np.maximum(fit.seconds(work[..., None]), 1e-12)
    pace = np.empty_like(left)
    for block in np.array_split(np.arange(len(left)), max(1, len(left) // _BLOCK)):
        pace[block] = np.median(left[block], axis=0)
    return WorkLines(
        work, fit.intercept_s, fit.slope_s[:, 0], pace, left / pace, is_size, is_certain
    )


def _error(fit: CostModel, work: FloatArray, took: FloatArray) -> float:
    """Return the largest standard error of the part that follows the work, of a rank's time."""
    spread, mean = work.std(axis=0), work.mean(axis=0)
    if (spread < ALIKE * mean).any():
        return float("inf")
    noise = abs(fit.seconds(work[..., None]) / took - 1)
    noise = 1.4826 * np.median(noise, axis=0)
    return float((noise * mean / spread).max() / np.sqrt(len(work)))


LEAST_STEPS: Final = 20
"""Fewer show nothing."""

_WARM_UP = 5  # steps: first ones compile, fill caches, build buckets
_FINE = 1 << 20  # samples of a step whose number is not known: so many that rounding is nothing


@final
@dataclass(frozen=True, slots=True)
class SpeedUp:
    """What one change would bring, with the step as it was measured as 1.

    Attributes:
        factor: how many times as fast; None where that cannot be known.
        least: the same if what is not known is as bad as it can be; at most ``factor``.
        reason: why there is no factor, or why it is a bound; empty where there is nothing to say.
    """

    factor: float | None
    least: float | None
    reason: str = ""


@final
@dataclass(frozen=True, slots=True)
class Counterfactuals:
    """What a step would take otherwise, all with the same global batch.

    Attributes:
        by_speed: each rank gets samples by its speed: ``Balancer()``.
        by_length: each rank gets as much to compute, whatever its speed.
        by_both: by speed and by length: ``Balancer(cost=...)``.
        slowest: the rank that computes for the longest.
        without_slowest: the others share its samples equally.
    """

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
    is_clear = lines.is_certain or seen.is_slow_throughout
    worst = lines if is_clear else lines.of_equal_slopes()
    by_speed = _speed_up(seen, partial(_by_speed, seen), lines, worst)
    by_length = _length_unknown(lines)
    by_both = by_speed
    if by_length is None:
        by_length = _speed_up(seen, _by_length, lines)
        by_both = _speed_up(seen, WorkLines.levelled, lines, worst)
    return Counterfactuals(
        by_speed=by_speed,
        by_length=by_length,
        by_both=by_both,
        slowest=slowest,
        without_slowest=_speed_up(
            replace(seen, own_s=OWN_S), partial(_without, rank=slowest), lines
        ),
    )


def _speed_up(
    seen: WatchedSteps,
    work_of: Callable[[WorkLines], FloatArray],
    lines: WorkLines,
    worst: WorkLines | None = None,
) -> SpeedUp:
    """Return the speed-up with other work, and with the least favourable lines."""
    factor = least = _factor(seen, lines, work_of(lines))
    if worst is not None and worst is not lines:
        least = min(factor, _factor(seen, worst, work_of(worst)))
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


def _length_unknown(lines: WorkLines) -> SpeedUp | None:
    """Return why nothing is said of lengths; None if something is."""
    if not lines.is_size:
        return SpeedUp(None, None, "the sizes of the batches are not known")
    if spread_of(lines.work) < ALIKE:  # rare short batches left out
        return SpeedUp(1.0, 1.0, "all batches have one size; if padded, try `cost`")
    return None


def _nothing(seen: WatchedSteps) -> Counterfactuals:
    # A row may be several short steps.
    why = (
        f"only {seen.num_steps} steps (or sums of short ones) were seen, and it takes "
        f"{LEAST_STEPS + _WARM_UP}"
    )
    unknown = SpeedUp(None, None, "there is one rank" if seen.world_size < 2 else why)
    slowest = int(np.argmax(seen.compute_s.mean(axis=0))) if seen.num_steps else 0
    return Counterfactuals(unknown, unknown, unknown, slowest, unknown)
