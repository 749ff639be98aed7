"""How much of a rank's computing goes with the size of its inputs."""

from __future__ import annotations

from typing import final

import numpy as np

from .._types import FloatArray

_KEPT = 0.98  # of the sums, at each addition: lengths change their meaning with the data
_FEWEST = 8.0  # steps
_LEAST_R2 = 0.3


@final
class SizeFit:
    """Least squares of own computing on size within each rank, from running sums.

    Within, so that a slower rank with fewer samples is not taken for one to which samples come for
    nothing. A rank whose own steps tell nothing has the median slope of the others.

    Args:
        world_size: number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._sums = np.zeros((6, world_size))
        self._origin: FloatArray | None = None  # of the sums, as squares of large numbers cancel

    def add(self, size: FloatArray, computed: FloatArray) -> None:
        """Take in some steps, both ``(num_steps, world_size)``."""
        if not size.any():
            return
        if self._origin is None:
            self._origin = np.stack([size.mean(axis=0), computed.mean(axis=0)])
        x, y = size - self._origin[0], computed - self._origin[1]
        parts = [np.ones_like(x), x, y, x * x, x * y, y * y]
        self._sums = _KEPT * self._sums + np.stack([part.sum(axis=0) for part in parts])

    def us_per_size(self) -> FloatArray:
        """Return the slopes, ``(world_size,)``; 0 where size explains too little."""
        number, x, y, xx, xy, yy = self._sums
        count = np.maximum(number, 1.0)
        of_size, both, of_time = xx - x * x / count, xy - x * y / count, yy - y * y / count
        known = (number >= _FEWEST) & (of_size > 1e-9) & (both > 0)
        slope = np.where(known, both, 0.0) / np.where(known, of_size, 1.0)
        known &= both * slope >= _LEAST_R2 * of_time
        if 2 * known.sum() < len(known):
            return np.zeros(len(known))
        return np.where(known, slope, np.median(slope[known]))
