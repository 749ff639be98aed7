r"""Least squares in relative errors, with coefficients that must not be negative.

All fits minimise the squared relative errors, $\sum_i (t(b_i) / \tau_i - 1)^2$: noise of a step
grows with its length. Of several measurements at one size the median counts. Fixed costs are at
least 0 and slopes positive, because a slope of 0 would make samples free: a profile that does not
rise gets a slope of a thousandth of its typical time per largest size, so nothing past that size
should be believed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from .._types import FloatArray, IntArray
from ..exceptions import invalid
from ._base import Profile

LEAST_RISE: Final = 1e-3
"""Share of a typical time by which every fitted curve rises at the least, up to the last size."""


@dataclass(frozen=True, slots=True, eq=False)
class Points:
    """One worker's profile, with one point per size.

    Attributes:
        sizes: ascending, no two alike, ``(num,)``.
        seconds: the median of the measurements at each, ``(num,)``.
    """

    sizes: IntArray
    seconds: FloatArray

    @classmethod
    def of(cls, sizes: IntArray, seconds: FloatArray) -> Points:
        """Return the medians of measurements whose ``sizes`` may repeat."""
        distinct, at = np.unique(sizes, return_inverse=True)
        medians = [float(np.median(seconds[at == index])) for index in range(len(distinct))]
        return cls(distinct, np.array(medians))


def points_of(profiles: Sequence[Profile], *, least: int, where: str) -> list[Points]:
    """Return every worker's profile with one point per size.

    Args:
        profiles: one for each worker.
        least: how many different sizes a curve needs.
        where: whose argument they are, for the error.

    Raises:
        ValueError: there is none, or one has fewer different sizes.
    """
    points = [Points.of(each.sizes, each.seconds) for each in profiles]
    if not points:
        raise invalid(where, "hold a profile for each worker", "none", "Measure each worker.")
    for rank, each in enumerate(points):
        if len(each.sizes) < least:
            rule = f"hold at least {least} different sizes on rank {rank}"
            raise invalid(where, rule, each.sizes.tolist(), "Measure more sizes.")
    return points


@dataclass(frozen=True, slots=True, eq=False)
class FittedLines:
    r"""Best lines $a + c x$, one for each candidate, all ``(num_candidates,)``.

    Attributes:
        intercept: $a$, at least 0.
        slope: $c$, positive.
        loss: mean of the squared relative errors.
    """

    intercept: FloatArray
    slope: FloatArray
    loss: FloatArray


def lines_through(x: FloatArray, y: FloatArray) -> FittedLines:
    r"""Return for each row of ``x`` the line that errs least, relative to ``y``.

    Minimises $\sum_i ((a + c x_i) / y_i - 1)^2$ over $a \ge 0$ and $c \ge c_0$, with $c_0$ so
    small that the line rises by ``LEAST_RISE`` of a typical ``y``.

    Args:
        x: at least 0, and positive somewhere on each row, ``(num_candidates, num)``.
        y: positive, ``(num,)``.
    """
    unit = float(np.median(y))
    y = y / unit
    weight = y**-2 / (y**-2).sum()
    mean_x, mean_y = x @ weight, float(y @ weight)
    off = x - mean_x[:, None]
    spread = off**2 @ weight
    free = np.divide(off @ (weight * y), spread, out=np.zeros(len(x)), where=spread > 0)
    least = LEAST_RISE * mean_y / x.max(axis=1)
    # The best without bounds, on either bound; what the first breaks, one of the others meets.
    slope = np.stack([free, x @ (weight * y) / (x**2 @ weight), least])
    intercept = np.stack([mean_y - free * mean_x, np.zeros(len(x)), mean_y - least * mean_x])
    loss = ((intercept[..., None] + slope[..., None] * x) / y - 1) ** 2
    score = np.where((intercept >= 0) & (slope >= least), loss.mean(axis=-1), np.inf)
    best = score.argmin(axis=0), np.arange(len(x))
    return FittedLines(intercept[best] * unit, slope[best] * unit, score[best])


def first_best(loss: FloatArray) -> int:
    """Return the first candidate that no other beats by more than rounding."""
    return int(np.argmax(loss <= loss.min() * (1 + 1e-9) + 1e-18))


def free(columns: FloatArray, y: FloatArray) -> FloatArray:
    """Return the coefficients whose sum of columns errs least relative to ``y``, of any sign."""
    found = np.linalg.lstsq(columns / y[:, None], np.ones(len(y)), rcond=None)[0]
    return found.astype(np.float64)


def nonnegative(columns: FloatArray, y: FloatArray) -> FloatArray:
    r"""Return the coefficients, none negative, whose sum of columns errs least relative to ``y``.

    Tries every subset of the columns, so there should be few.

    Args:
        columns: ``(num, num_columns)``, with no more columns than rows.
        y: positive, ``(num,)``.
    """
    num_columns = columns.shape[1]
    best, least = np.zeros(num_columns), np.inf
    for count in range(1, num_columns + 1):
        for subset in itertools.combinations(range(num_columns), count):
            some = columns[:, subset]
            found = free(some, y)
            loss = float(((some @ found / y - 1) ** 2).sum())
            if (found >= 0).all() and loss < least:
                best, least = np.zeros(num_columns), loss
                best[list(subset)] = found
    return best
