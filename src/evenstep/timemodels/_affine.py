"""A fixed cost per step plus a cost per sample."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import numpy as np
from numpy.typing import NDArray

from .._types import FloatArray, IntArray
from ._base import AbstractTimeModel, alike, bisect_batch, costs


@final
@dataclass(frozen=True, slots=True, eq=False)
class AffineTime(AbstractTimeModel):
    r"""Step times that grow in a straight line with the batch.

    $t_r(b) = a_r + c_r b$ for $b \ge 1$, and $t_r(0) = 0$. A worker without samples has no fixed
    cost either, so an expensive worker can be left out if its smallest batch is 0.

    Right for a CPU, and for a GPU past saturation. Wrong below saturation, where a GPU takes
    about the same time for any batch (``PiecewiseTime``), and where kernels come in tiles
    (the same, with a ``tile``); ``TableTime`` holds any curve.

    Args:
        intercept_s: fixed cost $a$ of a step in seconds, finite and at least 0,
            ``(world_size,)``.
        slope_s: cost $c$ of one sample in seconds, finite and at least 0, ``(world_size,)``.
            At 0 every batch takes as long as one sample.

    Raises:
        ValueError: an argument has no or another shape, is negative or is not finite.

    References:
        arXiv 1806.02508 (LB-BSP), the linear part of its GPU curve.
    """

    intercept_s: FloatArray
    slope_s: FloatArray
    _divisor: FloatArray = field(init=False, repr=False)
    _flat: NDArray[np.bool_] | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        intercept = costs("AffineTime(intercept_s=...)", self.intercept_s)
        slope = costs("AffineTime(slope_s=...)", self.slope_s)
        alike("AffineTime(slope_s=...)", slope, other="intercept_s", like=intercept)
        flat = slope == 0
        # Past the frozen guard: the fields as arrays of our own, and what `largest_batch` divides
        # by, worked out once because the solver calls it many times.
        object.__setattr__(self, "intercept_s", intercept)
        object.__setattr__(self, "slope_s", slope)
        object.__setattr__(self, "_divisor", np.where(flat, 1.0, slope))
        object.__setattr__(self, "_flat", flat if flat.any() else None)

    @property
    def world_size(self) -> int:
        return len(self.slope_s)

    def seconds(self, batch_size: IntArray) -> FloatArray:
        line: FloatArray = (self.intercept_s + self.slope_s * batch_size) * (batch_size > 0)
        return line

    def largest_batch(self, budget_s: float, most: IntArray) -> IntArray:
        with np.errstate(over="ignore"):
            exact = (budget_s - self.intercept_s) / self._divisor
        if self._flat is not None:
            exact = np.where(self._flat & (self.intercept_s <= budget_s), most, exact)
        # The nudge: a budget that is the time of b samples shall give b, not b - 1.
        batch: IntArray = np.minimum(np.maximum(exact * (1 + 2**-51), 0), most).astype(np.int64)

        for _ in range(2):
            more = (batch < most) & (self.seconds(batch + 1) <= budget_s)
            less = (batch > 0) & (self.seconds(batch) > budget_s)
            if not (more | less).any():
                return batch
            batch = batch + more - less
        # A slope below the resolution of its intercept: whole runs of sizes take equal times.
        return bisect_batch(self.seconds, budget_s, most=most)
