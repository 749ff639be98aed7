"""Step times that are flat until the device is full, and a straight line from there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import numpy as np

from .._types import FloatArray, IntArray
from ._affine import AffineTime
from ._base import AbstractTimeModel
from ._checks import alike, costs, counts


@final
@dataclass(frozen=True, slots=True, eq=False)
class PiecewiseTime(AbstractTimeModel):
    r"""Step times of a GPU: the same for any batch that does not fill it, then a straight line.

    $t_r(b) = f_r + c_r \max(b - s_r, 0)$ for $b \ge 1$, and $t_r(0) = 0$.

    Right where parallel lanes idle until the batch fills them. Real devices bend gently where
    this has a corner, and go in stairs past it (``StaircaseTime``). Wrong for a CPU, which has
    no lanes to fill: at $s = 0$ this is an ``AffineTime``. What does not fit in memory is none of
    its business: cap it with the cluster's `max_batch_size`.

    Args:
        flat_s: seconds $f$ of any batch up to saturation, finite and at least 0, ``(world_size,)``.
        saturation: samples $s$ that fill the device, integers of at least 0, ``(world_size,)``.
        slope_s: seconds $c$ of each sample past them, finite and at least 0, ``(world_size,)``.
            At 0 every batch takes as long as one sample.

    Raises:
        ValueError: an argument has no or another shape, is out of range or is not finite.

    References:
        arXiv 1806.02508 (LB-BSP), the curve of GPUs: flat to saturation, then linear.
    """

    flat_s: FloatArray
    saturation: IntArray
    slope_s: FloatArray
    _past: AffineTime = field(init=False, repr=False)

    def __post_init__(self) -> None:
        flat = costs("PiecewiseTime(flat_s=...)", self.flat_s)
        saturation = counts("PiecewiseTime(saturation=...)", self.saturation, least=0)
        slope = costs("PiecewiseTime(slope_s=...)", self.slope_s)
        alike("PiecewiseTime(saturation=...)", saturation, other="flat_s", like=flat)
        alike("PiecewiseTime(slope_s=...)", slope, other="flat_s", like=flat)
        # Past the frozen guard: the fields as arrays of our own.
        object.__setattr__(self, "flat_s", flat)
        object.__setattr__(self, "saturation", saturation)
        object.__setattr__(self, "slope_s", slope)
        object.__setattr__(self, "_past", AffineTime(flat, slope))

    @property
    def world_size(self) -> int:
        return len(self.flat_s)

    def seconds(self, batch_size: IntArray) -> FloatArray:
        past = np.maximum(batch_size - self.saturation, 0)
        times: FloatArray = (self.flat_s + self.slope_s * past) * (batch_size > 0)
        return times

    def largest_batch(self, budget_s: float, most: IntArray) -> IntArray:
        # Past saturation this is an affine model of the samples past it, bit for bit.
        past = self._past.largest_batch(budget_s, np.maximum(most - self.saturation, 0))
        return np.where(self.flat_s <= budget_s, np.minimum(self.saturation + past, most), 0)
