"""What a step takes each worker by what its samples have, fitted step by step and judged."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .._types import FloatArray, IntArray, check_range, check_ranks
from ..exceptions import invalid

_MOST_ROUNDS = 30
_SETTLED = 1e-4  # relative change of a prediction in one round
_FAR = 2.0  # spreads of the errors past which a step counts less
_SAME = 0.05  # change of what a step counts, below which the weights have settled


@final
@dataclass(frozen=True, slots=True, eq=False)
class CostModel:
    r"""Seconds of a step, $t_r = a_r + s_r (f_{k(r)} \cdot x_r)$, with $x_r$ the work of rank $r$.

    Attributes:
        intercept_s: $a_r$, what a step costs before its first sample, ``(world_size,)``.
        slope_s: $s_r f$, what one of each feature adds, ``(world_size, num_features)``.
    """

    intercept_s: FloatArray
    slope_s: FloatArray

    def seconds(self, features: ArrayLike) -> FloatArray:
        """Return the seconds of every worker.

        Args:
            features: summed over what each computes, ``(..., world_size, num_features)``. Of a
                padded forward: those of its longest sample, times its number of samples.
        """
        found: FloatArray = self.intercept_s + (np.asarray(features) * self.slope_s).sum(axis=-1)
        return found

    def level_s(self, features: ArrayLike) -> float:
        """Return when all workers end together, if the work could be cut anywhere.

        A worker that starts later than that takes no part. Where workers differ by a factor
        alone, no assignment ends earlier.

        Args:
            features: summed over all samples of a step, ``(num_features,)``.
        """
        cost = np.maximum(self.slope_s @ np.asarray(features), 1e-300)
        start = self.intercept_s
        order = np.argsort(start)
        for last in range(len(order), 0, -1):
            some = order[:last]
            level = (1 + (start[some] / cost[some]).sum()) / (1 / cost[some]).sum()
            if level > start[order[last - 1]]:
                break
        return float(level)


def fit_costs(
    features: ArrayLike,
    seconds: ArrayLike,
    kinds: Sequence[int],
    *,
    before: CostModel | None = None,
) -> CostModel:
    r"""Fit the cost model to measured steps.

    Minimises $\sum (\hat t / t - 1)^2$ over $a, s, f \ge 0$, in turns over the lines of the ranks
    and over $f$, which ranks of one kind of device share: so ranks that compute different work in
    one step separate features that are in proportion on each of them. Steps that err by more
    than twice what is usual count less, in proportion.

    Right where costs add up, or are padded and counted so. Where all steps were alike in
    all features, any split between them fits: forecasts for such steps are right, others are not.

    Args:
        features: what each rank computed, ``(num_steps, world_size, num_features)``.
        seconds: own time, NaN where it is not known, ``(num_steps, world_size)``.
        kinds: a number for the kind of device of each rank, ``(world_size,)``.
        before: a fit to some of these steps, to start from: that is quicker.

    Raises:
        ValueError: shapes do not fit, or some rank has no known time.
    """
    work, took = np.asarray(features, np.float64), np.asarray(seconds, np.float64)
    kind = np.asarray(kinds)
    if work.ndim != 3 or took.shape != work.shape[:2] or kind.shape != took.shape[1:]:
        raise invalid(
            "fit_costs(features=..., seconds=..., kinds=...)",
            "have the shapes (steps, ranks, features), (steps, ranks) and (ranks,)",
            f"{work.shape}, {took.shape} and {kind.shape}",
            "Stack what was observed step by step.",
        )
    known = np.isfinite(took) & (took > 0)
    num_known, remedy = known.sum(axis=0), "Leave out ranks that are not measured."
    check_ranks("fit_costs(seconds=...)", num_known, num_known > 0, "have known times", remedy)
    took = np.where(known, took, 1.0)
    model, weight = before, known.astype(np.float64)
    if model is not None:
        weight = _trust(model.seconds(work) / took - 1, known)
    column = np.concatenate([np.ones_like(work[..., :1]), work], axis=2) / took[..., None]
    column = np.ascontiguousarray(column.transpose(1, 0, 2))
    for _ in range(_MOST_ROUNDS):
        model = _nearest(column, weight.T[:, None], kind, model)
        last, weight = weight, _trust(model.seconds(work) / took - 1, known)
        if (abs(weight - last) <= _SAME).all():
            break
    assert model is not None
    return model


def _nearest(
    column: FloatArray, weight: FloatArray, kind: IntArray, before: CostModel | None
) -> CostModel:
    r"""Return the model $\theta$ with $c \cdot \theta$ nearest to 1 in the steps of every rank.

    Sums of products say all of the steps that a round needs, so rounds are as quick for many.

    Args:
        column: $c = (1, x) / t$, ``(world_size, num_steps, num_features + 1)``.
        weight: how much each step counts, ``(world_size, 1, num_steps)``.
        kind: of the device of each rank, ``(world_size,)``.
        before: where the rounds begin; with None, all features matter alike.
    """
    unit = np.sqrt((column**2).mean(axis=(0, 1)))
    unit[unit == 0] = 1.0
    moment = (weight @ column)[:, 0] / unit
    gram = (weight * column.swapaxes(1, 2)) @ column / (unit[:, None] * unit)
    kinds, first, which = np.unique(kind, return_index=True, return_inverse=True)
    shared = np.ones((len(kinds), len(unit) - 1))
    if before is not None:
        start = before.slope_s[first] * unit[1:]
        shared = np.where(start.any(axis=1, keepdims=True), start, shared)
    found = np.zeros_like(moment)
    for _ in range(_MOST_ROUNDS):
        last, (intercept, factor) = found, _lines(gram, moment, shared[which])
        for one in range(len(kinds)):
            ranks = which == one
            scale, rest = factor[ranks], intercept[ranks]
            left = moment[ranks, 1:] - rest[:, None] * gram[ranks, 0, 1:]
            costs = _nonnegative(
                np.tensordot(scale**2, gram[ranks, 1:, 1:], 1), scale @ left, shared[one]
            )
            shared[one] = costs if costs.any() else shared[one]
        found = np.concatenate([intercept[:, None], factor[:, None] * shared[which]], axis=1)
        change = (found - last)[:, None]
        if (change @ gram @ change.swapaxes(1, 2)).sum() <= _SETTLED**2 * (found * moment).sum():
            break
    found = found / unit
    return CostModel(found[:, 0], found[:, 1:])


def _lines(
    gram: FloatArray, moment: FloatArray, shared: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return for each rank the best ``a`` and ``s``, neither below 0, ``(world_size,)``."""
    one, cross = gram[:, 0, 0], (gram[:, 0, 1:] * shared).sum(axis=1)
    square = (shared[:, None] @ gram[:, 1:, 1:] @ shared[..., None])[:, 0, 0]
    target, aim = moment[:, 0], (moment[:, 1:] * shared).sum(axis=1)
    spread = one * square - cross**2
    differs = spread > 1e-9 * one * square
    safe = np.where(differs, spread, 1.0)
    slope = np.where(differs, one * aim - cross * target, 0.0) / safe
    intercept = (target - slope * cross) / one
    through = ~differs | (slope <= 0) | (intercept < 0)
    slope = np.where(through, aim / np.where(square > 0, square, 1.0), slope)
    return np.where(through & (square > 0), 0.0, intercept), slope


def _nonnegative(gram: FloatArray, moment: FloatArray, guess: FloatArray) -> FloatArray:
    """Return the costs, none negative, that come closest.

    That which no feature left at 0 would better is the best; those above 0 in `guess` are tried
    first, then all subsets.
    """
    num = len(gram)
    sizes = range(num, 0, -1)
    subsets = itertools.chain.from_iterable(itertools.combinations(range(num), n) for n in sizes)
    best, least = np.zeros(num), 0.0
    for subset in itertools.chain([tuple(np.flatnonzero(guess > 0))], subsets):
        some = np.array(subset)
        within = gram[some[:, None], some]
        found = np.linalg.lstsq(within, moment[some], rcond=1e-10)[0]
        loss = float(found @ within @ found - 2 * found @ moment[some])
        if (found < 0).any() or loss >= least:
            continue
        best, least = np.zeros(num), loss
        best[some] = found
        if (moment - gram @ best <= 1e-9 * abs(moment)).all():
            break
    return best


def _trust(error: FloatArray, known: NDArray[np.bool_]) -> FloatArray:
    """Return how much each step counts: less where it errs by more than is usual."""
    error = abs(error)
    usual = 1.4826 * float(np.median(error[known])) + 1e-12
    return np.where(known, np.minimum(1.0, _FAR * usual / np.maximum(error, 1e-300)), 0.0)


_MEMORY = 0.95  # of the mean error, per step
_IN_A_ROW = 5  # steps on one side of the predictions, after which a rank has another speed
_APART = 3.0  # usual errors that each of those is off: noise that lingers for ten steps is less
_MOST_KEPT = 512  # short steps: a fit to them takes milliseconds
_FIRST_NOISE = 0.03  # of a time, assumed before any was seen


@final
@dataclass(frozen=True, slots=True, eq=False)
class CostEstimator:
    """Learns what samples cost on each worker from the times of steps.

    Beside the model by features it keeps one by counts, and scores both by what they predict of
    the next step: where all ranks end together, all their times are alike, and any model explains
    them. Features that predict no better than counts are of no use.

    A rank whose steps take longer than predicted five times in a row, or shorter, has changed its
    speed. Its earlier times are then taken as if at the new one: what one feature costs beside
    another need not be learnt again.

    Usage:
        costs = CostEstimator.fresh(num_features=2, kinds=[0, 0, 0, 1])
        costs = costs.observe(features, counts, seconds)  # after every step
        costs.model.seconds(features)

    Attributes:
        kinds: a number for the kind of device of each rank: ranks of one kind share what a
            feature costs, up to a factor.
        window: steps that are remembered, at least 2; of short ones that are taken together, as
            many times that, up to 512.
        features: of those, ``(num_steps, world_size, num_features)``.
        counts: samples of each rank, ``(num_steps, world_size)``.
        seconds: own times, at the last speed of each rank, ``(num_steps, world_size)``.
        num_steps: how many were observed; several that were taken together are one.
        model: by features; None before the first step.
        by_count: by the number of samples alone; likewise.
        error: mean relative error of what ``model`` predicted, each at most 1: what a prediction
            of the next step is to be trusted. NaN before the second step.
        error_by_count: likewise of ``by_count``.
    """

    kinds: tuple[int, ...]
    window: int
    features: FloatArray
    counts: FloatArray
    seconds: FloatArray
    num_steps: int = 0
    model: CostModel | None = None
    by_count: CostModel | None = None
    error: float = float("nan")
    error_by_count: float = float("nan")

    @classmethod
    def fresh(cls, *, num_features: int, kinds: Sequence[int], window: int = 64) -> CostEstimator:
        """Return the estimator that has seen nothing.

        Raises:
            ValueError: ``num_features`` is not from 1 to 8, or ``window`` is below 2.
        """
        remedy = "A few steps distinguish few features: give fewer."
        check_range("CostEstimator(num_features=...)", num_features, "in [1, 8]", remedy)
        check_range("CostEstimator(window=...)", window, "at least 2", "64 is the default.")
        none = np.zeros((0, len(kinds)))
        return cls(tuple(kinds), window, none[..., None].repeat(num_features, 2), none, none)

    def observe(self, features: ArrayLike, counts: ArrayLike, seconds: ArrayLike) -> CostEstimator:
        """Return the estimator with one more step, or with several short ones taken together.

        Of several, each is remembered, and more of them (see ``window``): one fit for all is as
        quick as one for each long step, and a rank has changed its speed where it has in nearly all
        of them.

        Args:
            features: of what each rank computed, ``(world_size, num_features)``; of several steps,
                ``(num_steps, world_size, num_features)``.
            counts: samples of each rank, ``(world_size,)``; likewise.
            seconds: own time of each, NaN where it is not known, ``(world_size,)``; likewise.

        Raises:
            ValueError: the shapes are others.
        """
        steps = [np.asarray(one, np.float64) for one in (features, counts, seconds)]
        if steps[0].ndim == 2:
            steps = [one[None] for one in steps]
        wanted = self.features.shape[1:], self.counts.shape[1:], self.counts.shape[1:]
        num = len(steps[0])
        if not num or any(
            one.shape != (num, *shape) for one, shape in zip(steps, wanted, strict=True)
        ):
            raise invalid(
                "CostEstimator.observe(features, counts, seconds)",
                f"have the shapes {', '.join(map(str, wanted))}",
                ", ".join(str(np.shape(one)) for one in (features, counts, seconds)),
                "Give one row for each rank.",
            )
        work, samples, took = steps
        took = np.where(np.isfinite(took) & (took > 0), took, np.nan)
        most = max(self.window, min(self.window * num, _MOST_KEPT))
        kept = [
            np.concatenate([before, now])[-most:]
            for before, now in zip(
                (self.features, self.counts, self.seconds), (work, samples, took), strict=True
            )
        ]
        seen = replace(
            self,
            features=kept[0],
            counts=kept[1],
            seconds=kept[2],
            num_steps=self.num_steps + 1,
            error=self._scored(self.error, self.model, work, took),
            error_by_count=self._scored(
                self.error_by_count, self.by_count, samples[..., None], took
            ),
        )
        return seen._fitted(max(_IN_A_ROW, num))

    def uncertainty(self) -> FloatArray:
        r"""Return the relative standard error of what each rank is said to take, ``(world_size,)``.

        $\sigma_r \sqrt{p / (n - p)}$ for a line with $p = 2$ coefficients through $n$ steps, with
        $\sigma_r$ from the median error of the rank or of all ranks, whichever is larger. Right for
        work as in those steps, and errors that do not depend on each other. At first, some noise is
        assumed; 1 before the first step.
        """
        known = np.isfinite(self.seconds)
        some, num = known.any(axis=0), known.sum(axis=0)
        found = np.ones(len(self.kinds))
        if self.model is not None:
            off = abs(self.model.seconds(self.features) / self.seconds - 1)[:, some]
            noise = 1.4826 * np.maximum(np.nanmedian(off, axis=0), np.nanmedian(off))
            assumed = _FIRST_NOISE**2 * 2 / num[some]
            found[some] = np.sqrt((noise**2 + assumed) * 2 / np.maximum(num[some] - 2, 1))
        return found

    def _scored(
        self, error: float, model: CostModel | None, work: FloatArray, took: FloatArray
    ) -> float:
        """Return the mean error with that of one more step."""
        known = np.isfinite(took)
        if model is None or not known.any():
            return error
        # At most 1: a prediction of the first steps that is ten times too long would outweigh
        # thirty good ones.
        now = float(np.minimum(abs(model.seconds(work)[known] / took[known] - 1), 1).mean())
        weight = max(1 - _MEMORY, 1 / self.num_steps)
        return now if np.isnan(error) else (1 - weight) * error + weight * now

    def _fitted(self, late: int) -> CostEstimator:
        """Return the estimator with new models, where it is time for them.

        Args:
            late: number of the newest steps, in which a rank may have changed its speed.
        """
        if not np.isfinite(self.seconds).any(axis=0).all():
            return self
        change = self._change(late)
        has_changed = bool((change != 1).any())
        if self.num_steps > 8 and self.num_steps % 4 and not has_changed:
            return self
        took = self.seconds
        if has_changed:
            took = np.concatenate([took[:-late] * change, took[-late:]])
        return replace(
            self,
            seconds=took,
            model=fit_costs(self.features, took, self.kinds, before=self.model),
            by_count=fit_costs(self.counts[..., None], took, self.kinds, before=self.by_count),
        )

    def _change(self, late: int) -> FloatArray:
        """Return how many times as long each rank takes of late, ``(world_size,)``."""
        change = np.ones(len(self.kinds))
        if self.model is None or self.by_count is None or len(self.seconds) <= 2 * late:
            return change
        predicted = self.model.seconds(self.features)
        if self.error > self.error_by_count:
            predicted = self.by_count.seconds(self.counts[..., None])
        ratio = np.log(self.seconds / np.maximum(predicted, 1e-300))
        apart = _APART * 1.4826 * float(np.nanmedian(abs(ratio)))
        recent, least = ratio[-late:], late - late // 10  # some of many may be pauses
        slower, faster = (recent > apart).sum(axis=0), (recent < -apart).sum(axis=0)
        changed = np.maximum(slower, faster) >= least
        change[changed] = np.exp(np.nanmedian(recent[:, changed], axis=0))
        return change
