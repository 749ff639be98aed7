"""Step times that rise a tile at a time."""

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
class StaircaseTime(AbstractTimeModel):
    r"""Step times that rise by a stair per tile: a kernel computes a tile whole or not at all.

    $t_r(b) = a_r + c_r \lceil b / w_r \rceil$ for $b \ge 1$, and $t_r(0) = 0$.

    Right where one kernel's tile, or the sizes a compiled graph is padded to, rules the step.
    Wrong where layers have tiles of their own: their stairs add up to something close to a
    straight line. Sizes between two stairs cost as much as the next one: ``allocate`` knows, and
    a `granularity` of the cluster at $w$ keeps all workers on whole tiles besides.

    Args:
        intercept_s: fixed cost $a$ of a step in seconds, finite and at least 0,
            ``(world_size,)``.
        stair_s: seconds $c$ of a tile, finite and at least 0, ``(world_size,)``.
        tile: samples $w$ in a tile, integers of at least 1, ``(world_size,)``. At 1 this is an
            ``AffineTime``.

    Raises:
        ValueError: an argument has no or another shape, is out of range or is not finite.

    References:
        Ours; NVIDIA's *Matrix Multiplication Background User's Guide* explains the effect under
        "tile quantization".
    """

    intercept_s: FloatArray
    stair_s: FloatArray
    tile: IntArray
    _in_tiles: AffineTime = field(init=False, repr=False)

    def __post_init__(self) -> None:
        intercept = costs("StaircaseTime(intercept_s=...)", self.intercept_s)
        stair = costs("StaircaseTime(stair_s=...)", self.stair_s)
        tile = counts("StaircaseTime(tile=...)", self.tile, least=1)
        alike("StaircaseTime(stair_s=...)", stair, other="intercept_s", like=intercept)
        alike("StaircaseTime(tile=...)", tile, other="intercept_s", like=intercept)
        # Past the frozen guard: the fields as arrays of our own.
        object.__setattr__(self, "intercept_s", intercept)
        object.__setattr__(self, "stair_s", stair)
        object.__setattr__(self, "tile", tile)
        object.__setattr__(self, "_in_tiles", AffineTime(intercept, stair))

    @property
    def world_size(self) -> int:
        return len(self.tile)

    def seconds(self, batch_size: IntArray) -> FloatArray:
        return self._in_tiles.seconds(self._tiles(batch_size))

    def largest_batch(self, budget_s: float, most: IntArray) -> IntArray:
        tiles = self._in_tiles.largest_batch(budget_s, self._tiles(most))
        batch: IntArray = np.minimum(tiles * self.tile, most)
        return batch

    def _tiles(self, batch_size: IntArray) -> IntArray:
        tiles: IntArray = -(-batch_size // self.tile)
        return tiles
