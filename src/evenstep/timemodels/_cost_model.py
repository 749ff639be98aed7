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
_SETTLED = 1e-4  # relative change of a forecast between two rounds
_FAR = 2.0  # spreads of the errors past which a step counts less


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


def fit_costs(features: ArrayLike, seconds: ArrayLike, kinds: Sequence[int]) -> CostModel:
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
    unit = np.maximum(work[known].mean(axis=0), 1e-300)
    intercept, slope = _alternate(work / unit, took, known.astype(np.float64), kind)
    return CostModel(intercept, slope / unit)


def _alternate(
    work: FloatArray, took: FloatArray, known: FloatArray, kind: IntArray
) -> tuple[FloatArray, FloatArray]:
    """Return intercepts and slopes, by turns over lines and shared features."""
    shared = np.ones((kind.max() + 1, work.shape[2]))
    weight, before = known, np.zeros_like(took)
    intercept, factor = np.zeros(work.shape[1]), np.ones(work.shape[1])
    for _ in range(_MOST_ROUNDS):
        intercept, factor = _lines((work * shared[kind]).sum(axis=2), took, weight)
        for one in np.unique(kind):
            ranks = kind == one
            columns = factor[ranks][:, None] * work[:, ranks] / took[:, ranks, None]
            left = 1 - intercept[ranks] / took[:, ranks]
            found = _nonnegative(columns, left, weight[:, ranks])
            shared[one] = found if found.any() else shared[one]
        slope = factor[:, None] * shared[kind]
        now = intercept + (work * slope).sum(axis=2)
        weight = known * _trust(now / took - 1, known)
        if (abs(now - before) <= _SETTLED * took).all():
            break
        before = now
    return intercept, slope


def _lines(work: FloatArray, took: FloatArray, weight: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return for each rank the best line ``a + s work`` with neither below 0, ``(world_size,)``."""
    weight = weight / took**2
    total = np.maximum(weight.sum(axis=0), 1e-300)
    mean_x, mean_y = (weight * work).sum(axis=0) / total, (weight * took).sum(axis=0) / total
    off = work - mean_x
    spread = (weight * off**2).sum(axis=0)
    differs = spread > 1e-9 * total * mean_x**2
    free = _over((weight * off * took).sum(axis=0), spread, differs)
    through = _over((weight * work * took).sum(axis=0), (weight * work**2).sum(axis=0), mean_x > 0)
    slope = np.where((free > 0) & (mean_y - free * mean_x >= 0), free, through)
    return np.maximum(mean_y - slope * mean_x, 0.0), slope


def _over(top: FloatArray, bottom: FloatArray, where: NDArray[np.bool_]) -> FloatArray:
    return np.divide(top, bottom, out=np.zeros_like(top), where=where)


def _nonnegative(columns: FloatArray, left: FloatArray, weight: FloatArray) -> FloatArray:
    """Return the coefficients, none negative, that come closest; every subset is tried."""
    columns = columns.reshape(-1, columns.shape[-1])
    left, weight = left.ravel(), weight.ravel()
    gram, moment = (columns.T * weight) @ columns, (columns.T * weight) @ left
    num = len(gram)
    best, least = np.zeros(num), 0.0
    for count in range(1, num + 1):
        for subset in itertools.combinations(range(num), count):
            some = list(subset)
            found = np.linalg.lstsq(gram[np.ix_(some, some)], moment[some], rcond=1e-10)[0]
            loss = float(found @ gram[np.ix_(some, some)] @ found - 2 * found @ moment[some])
            if (found >= 0).all() and loss < least:
                best, least = np.zeros(num), loss
                best[some] = found
    return best


def _trust(error: FloatArray, known: FloatArray) -> FloatArray:
    """Return how much each step counts: less where it errs by more than is usual."""
    usual = 1.4826 * float(np.median(abs(error[known > 0]))) + 1e-12
    trust: FloatArray = np.minimum(1.0, _FAR * usual / np.maximum(abs(error), 1e-300))
    return trust
