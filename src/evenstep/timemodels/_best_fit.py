"""The kind of curve that foretells a profile best, worker by worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np

from .._types import FloatArray, IntArray
from ._base import AbstractTimeModel
from ._cubic import MOST
from ._fits import AFFINE, CUBIC, PIECEWISE, STAIRCASE, Kind, model_of, points_of
from ._least_squares import Points
from ._profile import Profile

KINDS: Final = (AFFINE, PIECEWISE, STAIRCASE, CUBIC)
PENALTY: Final = 1.15
"""Factor on the error for each parameter: one more has to foretell that much better."""
FLOOR: Final = 2e-3
"""Relative error below which there is nothing to choose: no two steps are that much alike."""


@dataclass(frozen=True, slots=True, eq=False)
class BestFit:
    """What ``ClusterProfile.best_fit`` chose.

    Attributes:
        times: the workers' times.
        kinds: "affine", "piecewise", "staircase" or "cubic", one per rank.
        error: mean relative error at sizes left out of the fit, ``(world_size,)``. NaN for a
            worker with two sizes, where none can be left out.
    """

    times: AbstractTimeModel
    kinds: tuple[str, ...]
    error: FloatArray


def best_fit(profiles: Sequence[Profile]) -> BestFit:
    r"""Fit to every worker's profile the kind of curve that foretells it best.

    A kind with $k$ parameters is chosen by the smallest $\max(e, 0.002) \cdot 1.15^k$, $e$ its mean
    relative error at sizes left out, and takes part with $k + 1$ different sizes or more. It may
    still mislead between sizes (stairs hide from powers of two) and past them.
    """
    points = points_of(profiles)
    kinds, errors = zip(*map(_choose, points), strict=True)
    is_cubic, parts, ranks = np.array([kind is CUBIC for kind in kinds]), [], []
    for held in (np.flatnonzero(~is_cubic), np.flatnonzero(is_cubic)):
        if len(held):
            parts.append(model_of([kinds[rank] for rank in held], [points[rank] for rank in held]))
            held.flags.writeable = False
            ranks.append(held)
    times = parts[0] if len(parts) == 1 else SideBySide(tuple(parts), tuple(ranks))
    return BestFit(times, tuple(kind.name for kind in kinds), np.array(errors))


@final
@dataclass(frozen=True, slots=True, eq=False)
class SideBySide(AbstractTimeModel):
    """Cubics and the other curves, each part described by its own model.

    As right, and as exact, as its parts.

    Attributes:
        parts: time models, at least one.
        ranks: whose times they are, for each part the ranks of its workers in its own order. All
            together they are 0 to ``world_size - 1``, each once.
    """

    parts: tuple[AbstractTimeModel, ...]
    ranks: tuple[IntArray, ...]

    @property
    def world_size(self) -> int:
        return sum(len(ranks) for ranks in self.ranks)

    def seconds(self, batch_size: IntArray) -> FloatArray:
        times = np.empty(self.world_size)
        for part, ranks in zip(self.parts, self.ranks, strict=True):
            times[ranks] = part.seconds(batch_size[ranks])
        return times

    def largest_batch(self, budget_s: float, most: IntArray) -> IntArray:
        batch = np.empty(self.world_size, np.int64)
        for part, ranks in zip(self.parts, self.ranks, strict=True):
            batch[ranks] = part.largest_batch(budget_s, most[ranks])
        return batch


def _choose(points: Points) -> tuple[Kind, float]:
    """Return the kind that foretells best, and its error."""
    most, num_sizes = int(points.sizes[-1]), len(points.sizes)
    able = [kind for kind in KINDS if kind.num_parameters < num_sizes]
    if not able:
        return AFFINE, np.nan
    errors = {kind: _error(kind, points) for kind in able if kind is not CUBIC or most <= MOST}
    kind = min(errors, key=lambda kind: max(errors[kind], FLOOR) * PENALTY**kind.num_parameters)
    return kind, errors[kind]


def _error(kind: Kind, points: Points) -> float:
    """Return the mean relative error at each size, by the fit to all others."""
    total = 0.0
    for index, (size, actual_s) in enumerate(zip(points.sizes, points.seconds, strict=True)):
        times = model_of([kind], [points.without(index)])
        foretold_s = float(times.seconds(np.array([size]))[0])
        total += abs(foretold_s / actual_s - 1)
    return total / len(points.sizes)
