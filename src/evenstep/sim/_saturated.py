"""Step times that are flat until the device is full, and a straight line from there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from .._types import FloatArray, IntArray
from ..timemodels import AbstractTimeModel
from ..timemodels._affine import AffineTime


@final
@dataclass(frozen=True, slots=True, eq=False)
class SaturatedTime(AbstractTimeModel):
    r"""$t_r(b) = a_r + c_r \max(b, s_r)$ for $b \ge 1$, and 0 at 0.

    Right for a GPU that takes about the same time for any batch that does not fill it. Real ones
    bend gently where this has a corner, and go in stairs past it.

    Args:
        line: $a$ and $c$.
        saturation: $s$, the samples that fill each device, at least 0, ``(world_size,)``.

    References:
        The curve of GPUs in arXiv 1806.02508 (LB-BSP), flat and then linear.
    """

    line: AffineTime
    saturation: IntArray

    @property
    def world_size(self) -> int:
        return self.line.world_size

    def seconds(self, batch_size: IntArray) -> FloatArray:
        times: FloatArray = self.line.seconds(np.maximum(batch_size, self.saturation))
        return times * (batch_size > 0)

    def largest_batch(self, budget_s: float, most: IntArray) -> IntArray:
        # A worker that cannot afford a full device cannot afford one sample either.
        batch = self.line.largest_batch(budget_s, np.maximum(most, self.saturation))
        full = np.maximum(self.saturation, 1)
        return np.where(batch >= full, np.minimum(batch, most), 0)
