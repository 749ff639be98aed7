"""What a step takes each worker by what its samples have, and not by how many they are."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .._types import FloatArray, IntArray
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
    one step tell features apart that are in proportion on each of them. Steps that err by more
    than twice what is usual count less, in proportion.

    Right where costs add up, or are padded and counted so. Where all steps were alike in
    all features, any split between them fits: forecasts for such steps are right, others are not.

    Args:
        features: what each rank computed, ``(num_steps, world_size, num_features)``.
        seconds: own time, NaN where it is not known, ``(num_steps, world_size)``.
        kinds: a number for the kind of device of each rank, ``(world_size,)``.
        before: a fit to some of these steps, from which to go on: that is quicker.

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
    if not known.any(axis=0).all():
        rank = int(np.argmin(known.any(axis=0)))
        raise invalid(
            "fit_costs(seconds=...)",
            "have a known time of every rank",
            f"none of rank {rank}",
            "Leave out ranks that are not measured.",
        )
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
