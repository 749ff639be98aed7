r"""Time models fitted to profiles, every worker by itself.

All fits minimise the squared relative errors, $\sum_i (t(b_i) / \tau_i - 1)^2$: noise of a step
grows with its length. Of several measurements at one size the median counts. Fixed costs are at
least 0 and slopes positive, because a slope of 0 would make samples free: a profile that does not
rise gets a slope of a thousandth of its typical time per largest size, so nothing past that size
should be believed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .._types import IntArray
from ..exceptions import invalid
from ._base import AbstractTimeModel
from ._cubic import CubicTime
from ._least_squares import (
    LEAST_RISE,
    FittedLines,
    Points,
    first_best,
    free,
    lines_through,
    nonnegative,
)
from ._piecewise import PiecewiseTime
from ._profile import Profile

NUM_CANDIDATES: Final = 256
"""Knees and tiles tried at once, each by a fit of its own."""

Arguments = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Kind:
    """A family of curves that can be fitted.

    Attributes:
        name: as people read it.
        num_parameters: per worker; as many distinct sizes are needed for a fit.
        fit: from one worker's points to the arguments of ``model`` for it.
        model: from one column of arguments each, over the workers, to the model.
    """

    name: str
    num_parameters: int
    fit: Callable[[Points], Arguments]
    model: Callable[..., AbstractTimeModel]


def model_of(kinds: Sequence[Kind], points: Sequence[Points]) -> Any:
    """Return the model of workers whose curves are of these kinds, all with the same ``model``."""
    arguments = [kind.fit(each) for kind, each in zip(kinds, points, strict=True)]
    return kinds[0].model(*(np.array(column) for column in zip(*arguments, strict=True)))


def fit(kind: Kind, profiles: Sequence[Profile]) -> Any:
    """Return the model of one kind for all workers.

    Raises:
        ValueError: a profile has fewer different sizes than the kind has parameters.
    """
    points = points_of(profiles)
    for rank, each in enumerate(points):
        if len(each.sizes) < kind.num_parameters:
            raise invalid(
                "ClusterProfile(profiles=...)",
                f"hold at least {kind.num_parameters} different sizes on rank {rank} for a curve "
                f"of the kind {kind.name!r}",
                each.sizes.tolist(),
                "Measure more, or use `best_fit`.",
            )
    return model_of([kind] * len(points), points)


def points_of(profiles: Sequence[Profile]) -> list[Points]:
    """Return every worker's profile with one point per size."""
    return [Points.of(each.sizes, each.seconds) for each in profiles]


def _affine(points: Points) -> Arguments:
    """A fixed cost and a cost per sample."""
    line = lines_through(points.sizes[None, :].astype(np.float64), points.seconds)
    return line.intercept[0], 0, line.slope[0], 1


def _piecewise(points: Points) -> Arguments:
    """A flat part, a saturation and a slope.

    The knee errs least of 256 between 0 and the last size but one, sought once more between its
    neighbours. A line that starts at 0 wins ties. Right with two sizes or more on either side of
    the knee. With one, the knee may stand anywhere between it and the next.
    """
    last = int(points.sizes[-2])
    spread = np.geomspace(1, last, NUM_CANDIDATES).round().astype(np.int64)
    knees = np.unique(np.concatenate([[0], spread, points.sizes[:-1]]))
    losses = _past(knees, points).loss
    best = first_best(losses)
    low, high = knees[max(best - 1, 0)], knees[min(best + 1, len(knees) - 1)]
    between = np.linspace(low, high, NUM_CANDIDATES).round().astype(np.int64)
    knees = np.unique(np.concatenate([between, knees[best : best + 1]]))
    lines = _past(knees, points)
    best = first_best(lines.loss)
    return lines.intercept[best], knees[best], lines.slope[best], 1


def _past(knees: IntArray, points: Points) -> FittedLines:
    """Return the best lines through the samples past each knee."""
    past = np.maximum(points.sizes - knees[:, None], 0).astype(np.float64)
    return lines_through(past, points.seconds)


def _staircase(points: Points) -> Arguments:
    """A fixed cost, a stair and a tile.

    The tile errs least of all up to 256 samples and of the powers of two past them, none past the
    largest size. The smallest wins ties. Right where sizes lie on both sides of several stairs,
    such as multiples of the tile and one sample more. Powers of two alone cannot tell a staircase
    from a line: a tile of 1 then.
    """
    largest = int(points.sizes[-1])
    tiles = np.concatenate([np.arange(1, NUM_CANDIDATES + 1), 2 ** np.arange(9, 53)])
    tiles = tiles[tiles <= largest]
    in_tiles: NDArray[np.int64] = -(-points.sizes // tiles[:, None])
    lines = lines_through(in_tiles.astype(np.float64), points.seconds)
    best = first_best(lines.loss)
    return lines.intercept[best], 0, lines.slope[best], tiles[best]


def _cubic(points: Points) -> Arguments:
    r"""LBB's cubic, in a form that never falls.

    With $u = b / m$, $m$ the largest size measured, it is a constant plus
    $\int_0^u \beta_0 (1-v)^2 + 2 \beta_1 v (1-v) + \beta_2 v^2 \, dv$. The least-squares cubic is
    taken where it starts at 0 or above and rises all the way: $\beta_0, \beta_2 > 0$ and
    $\beta_1 \ge -\sqrt{\beta_0 \beta_2}$. Elsewhere, the best one without a negative coefficient,
    which rises too. Right for curves that bend gently, from sizes that cover the range. Wrong for
    corners and stairs, and of no use past $m$.
    """
    largest = int(points.sizes[-1])
    u = points.sizes / largest
    unit = float(np.median(points.seconds))
    shapes = np.stack([np.ones_like(u), u - u**2 + u**3 / 3, u**2 - 2 * u**3 / 3, u**3 / 3], axis=1)
    y = points.seconds / unit
    found = free(shapes, y)
    constant, first, middle, last = (float(each) * unit for each in found)
    if min(constant, first, last) <= 0 or middle < -np.sqrt(first * last):
        least = np.array([0, LEAST_RISE, LEAST_RISE, LEAST_RISE])
        found = np.maximum(nonnegative(shapes, y), least)
        constant, first, middle, last = (float(each) * unit for each in found)
    third, second = (first - 2 * middle + last) / 3, middle - first
    return (third / largest**3, second / largest**2, first / largest, constant), largest


AFFINE: Final = Kind("affine", 2, _affine, PiecewiseTime)
PIECEWISE: Final = Kind("piecewise", 3, _piecewise, PiecewiseTime)
STAIRCASE: Final = Kind("staircase", 3, _staircase, PiecewiseTime)
CUBIC: Final = Kind("cubic", 4, _cubic, CubicTime)
