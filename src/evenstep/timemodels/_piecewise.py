"""Step times that are flat until the device is full, and a straight line or stairs from there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Self, final

import numpy as np

from .._types import FloatArray, IntArray
from ._affine import AffineTime
from ._base import AbstractTimeModel, alike, costs, counts
from ._least_squares import FittedLines, Points, first_best, lines_through, points_of
from ._profile import Profile

NUM_CANDIDATES: Final = 256
"""Knees tried at once, each by a fit of its own."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class PiecewiseTime(AbstractTimeModel):
    r"""Step times of a GPU: the same for any batch that does not fill it, then rising.

    $t_r(b) = f_r + c_r \lceil \max(b - s_r, 0) / w_r \rceil$ for $b \ge 1$, and $t_r(0) = 0$.

    Right if parallel lanes idle until the batch fills them; with tiles, if a kernel computes only
    whole tiles, or a compiled graph pads its sizes. Real devices have a gentle bend where this has
    a corner. Layers with different tiles add up to something close to a straight line. With
    $s = 0$ this is a staircase, and with $w = 1$ in addition an ``AffineTime``, as for a CPU. So
    workers of all these kinds fit into one model. Sizes between two stairs cost as much as the next
    stair. ``allocate`` takes this into account, and a `granularity` of $w$ in the cluster keeps all
    workers at whole tiles. The model knows nothing of memory: use the cluster's `max_batch_size`.

    Args:
        flat_s: seconds $f$ of any batch up to saturation, finite and at least 0, ``(world_size,)``.
        saturation: samples $s$ that fill the device, integers of at least 0, ``(world_size,)``.
            At 0, $f$ is the fixed cost of a step.
        slope_s: cost $c$ in seconds of one tile past saturation, finite and at least 0,
            ``(world_size,)``. At 0 every batch takes as long as one sample.
        tile: samples $w$ in a tile, integers of at least 1, ``(world_size,)``; None is 1
            everywhere, so that $c$ is the cost of one sample.

    Raises:
        ValueError: an argument has no or another shape, is out of range or is not finite.

    References:
        arXiv 1806.02508 (LB-BSP), the curve of GPUs: flat to saturation, then linear. Tiles are
        ours; NVIDIA's *Matrix Multiplication Background User's Guide* explains the effect under
        "tile quantization".
    """

    flat_s: FloatArray
    saturation: IntArray
    slope_s: FloatArray
    tile: IntArray | None = None
    _tile: IntArray = field(init=False, repr=False)
    _past: AffineTime = field(init=False, repr=False)

    def __post_init__(self) -> None:
        flat = costs("PiecewiseTime(flat_s=...)", self.flat_s)
        saturation = counts("PiecewiseTime(saturation=...)", self.saturation, least=0)
        slope = costs("PiecewiseTime(slope_s=...)", self.slope_s)
        given = np.ones(len(flat), np.int64) if self.tile is None else self.tile
        tile = counts("PiecewiseTime(tile=...)", given, least=1)
        alike("PiecewiseTime(saturation=...)", saturation, other="flat_s", like=flat)
        alike("PiecewiseTime(slope_s=...)", slope, other="flat_s", like=flat)
        alike("PiecewiseTime(tile=...)", tile, other="flat_s", like=flat)
        # Past the frozen guard: the fields as arrays of our own.
        object.__setattr__(self, "flat_s", flat)
        object.__setattr__(self, "saturation", saturation)
        object.__setattr__(self, "slope_s", slope)
        object.__setattr__(self, "tile", tile)
        object.__setattr__(self, "_tile", tile)
        object.__setattr__(self, "_past", AffineTime(flat, slope))

    @classmethod
    def fitted(cls, profiles: Sequence[Profile]) -> Self:
        """Return LB-BSP's curve of GPUs, flat and then a line, for every worker.

        Right with two sizes or more on either side of the knee. With one, the knee may stand
        anywhere between it and the next.

        Args:
            profiles: what was measured on each worker.

        Raises:
            ValueError: a profile has fewer than three different sizes.
        """
        points = points_of(profiles, least=3, where="PiecewiseTime.fitted(profiles=...)")
        flat_s, saturation, slope_s = zip(*map(_fit, points), strict=True)
        return cls(np.array(flat_s), np.array(saturation), np.array(slope_s))

    @property
    def world_size(self) -> int:
        return len(self.flat_s)

    def seconds(self, batch_size: IntArray) -> FloatArray:
        times: FloatArray = (self.flat_s + self.slope_s * self._tiles(batch_size)) * (
            batch_size > 0
        )
        return times

    def largest_batch(self, budget_s: float, most: IntArray) -> IntArray:
        # Past saturation this is an affine model of the tiles past it, bit for bit.
        past = self._past.largest_batch(budget_s, self._tiles(most)) * self._tile
        return np.where(self.flat_s <= budget_s, np.minimum(self.saturation + past, most), 0)

    def _tiles(self, batch_size: IntArray) -> IntArray:
        """Return the tiles past saturation, the last perhaps in part."""
        tiles: IntArray = -(-np.maximum(batch_size - self.saturation, 0) // self._tile)
        return tiles


def _fit(points: Points) -> tuple[float, int, float]:
    """Return the flat seconds, the saturation and the slope of one worker's curve.

    The knee errs least of 256 between 0 and the last size but one, sought once more between its
    neighbours. A line that starts at 0 wins ties.
    """
    last = int(points.sizes[-2])
    spread = np.geomspace(1, last, NUM_CANDIDATES).round().astype(np.int64)
    knees = np.unique(np.concatenate([[0], spread, points.sizes[:-1]]))
    best = first_best(_past(knees, points).loss)
    low, high = knees[max(best - 1, 0)], knees[min(best + 1, len(knees) - 1)]
    between = np.linspace(low, high, NUM_CANDIDATES).round().astype(np.int64)
    knees = np.unique(np.concatenate([between, knees[best : best + 1]]))
    lines = _past(knees, points)
    best = first_best(lines.loss)
    return float(lines.intercept[best]), int(knees[best]), float(lines.slope[best])


def _past(knees: IntArray, points: Points) -> FittedLines:
    """Return the best lines through the samples past each knee."""
    past = np.maximum(points.sizes - knees[:, None], 0).astype(np.float64)
    return lines_through(past, points.seconds)
