"""Time models fitted to profiles, every worker by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .._types import FloatArray, IntArray
from ..exceptions import invalid
from ._affine import AffineTime
from ._base import AbstractTimeModel
from ._cubic import CubicTime
from ._least_squares import LEAST_RISE, Lines, Points, first_best, free, lines_through, nonnegative
from ._piecewise import PiecewiseTime
from ._profile import measured
from ._staircase import StaircaseTime

NUM_CANDIDATES: Final = 256
"""Knees and tiles tried at once, each by a fit of its own."""

Parameters = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Kind:
    """A family of curves that can be fitted.

    Attributes:
        name: as people read it.
        num_parameters: per worker; as many distinct sizes are needed for a fit.
        fit: from one worker's points to its parameters.
        model: from one column of parameters each, over the workers, to the model.
    """

    name: str
    num_parameters: int
    fit: Callable[[Points], Parameters]
    model: Callable[..., AbstractTimeModel]

    def of(self, parameters: Sequence[Parameters]) -> Any:
        """Return the model of workers with these parameters."""
        return self.model(*(np.array(column) for column in zip(*parameters, strict=True)))


def fit_affine(sizes: Sequence[IntArray], seconds: Sequence[FloatArray]) -> AffineTime:
    r"""Fit a fixed cost and a cost per sample to every worker's profile.

    Of several measurements at one size the median counts. Minimises the squared relative errors,
    $\sum_i (t(b_i) / \tau_i - 1)^2$, over intercepts of at least 0 and positive slopes. All fits
    here do so: noise of a step grows with its length, and a slope of 0 would make samples free.
    A profile that does not rise gets a slope of a thousandth of its typical time per largest
    size, so nothing past that size should be believed.

    Args:
        sizes: batch sizes measured, one ascending array per worker, as in ``Profile``. Lengths
            may differ.
        seconds: what they took, likewise.

    Raises:
        ValueError: the two hold no or unlike numbers of workers, or what no ``Profile`` may hold;
            the message names the rank.
    """
    return _fit(AFFINE, "fit_affine", sizes, seconds)  # type: ignore[no-any-return]


def fit_piecewise(sizes: Sequence[IntArray], seconds: Sequence[FloatArray]) -> PiecewiseTime:
    r"""Fit a flat part, a saturation and a slope to every worker's profile.

    As ``fit_affine``, with the knee that errs least of 256 between 0 and the last size but one,
    sought once more between its neighbours. A line that starts at 0 wins ties.

    Right with two sizes or more on either side of the knee. With one, the knee may stand
    anywhere between it and the next.

    Args:
        sizes: as in ``fit_affine``; three different sizes at least.
        seconds: what they took, likewise.

    Raises:
        ValueError: as for ``fit_affine``, or a profile has fewer than three sizes.
    """
    return _fit(PIECEWISE, "fit_piecewise", sizes, seconds)  # type: ignore[no-any-return]


def fit_staircase(sizes: Sequence[IntArray], seconds: Sequence[FloatArray]) -> StaircaseTime:
    r"""Fit a fixed cost, a stair and a tile to every worker's profile.

    As ``fit_affine``, with the tile that errs least of all up to 256 samples and of the powers of
    two past them, none past the largest size. The smallest wins ties.

    Right where sizes lie on both sides of several stairs, such as multiples of the tile and one
    sample more. Powers of two alone cannot tell a staircase from a line: a tile of 1 then.

    Args:
        sizes: as in ``fit_affine``; three different sizes at least.
        seconds: what they took, likewise.

    Raises:
        ValueError: as for ``fit_affine``, or a profile has fewer than three sizes.
    """
    return _fit(STAIRCASE, "fit_staircase", sizes, seconds)  # type: ignore[no-any-return]


def fit_cubic(sizes: Sequence[IntArray], seconds: Sequence[FloatArray]) -> CubicTime:
    r"""Fit LBB's cubic to every worker's profile, in a form that never falls.

    With $u = b / m$, $m$ the largest size measured, it is a constant plus
    $\int_0^u \beta_0 (1-v)^2 + 2 \beta_1 v (1-v) + \beta_2 v^2 \, dv$. The least-squares cubic is
    taken where it starts at 0 or above and rises all the way: $\beta_0, \beta_2 > 0$ and
    $\beta_1 \ge -\sqrt{\beta_0 \beta_2}$. Elsewhere, the best one without a negative coefficient,
    which rises too. Otherwise as ``fit_affine``.

    Right for curves that bend gently, from sizes that cover the range. Wrong for corners and
    stairs, and of no use past $m$.

    Args:
        sizes: as in ``fit_affine``; four different sizes at least, up to 2**20.
        seconds: what they took, likewise.

    Returns:
        A model whose ``most`` is each worker's largest size.

    Raises:
        ValueError: as for ``fit_affine``, or a profile has fewer than four sizes or a larger one.
    """
    return _fit(CUBIC, "fit_cubic", sizes, seconds)  # type: ignore[no-any-return]


def points_of(owner: str, sizes: Sequence[Any], seconds: Sequence[Any]) -> list[Points]:
    """Return every worker's profile with one point per size, errors in the name of ``owner``."""
    if not len(sizes):
        raise invalid(f"{owner}(sizes=...)", "hold a profile", "none", "Give one per worker.")
    if len(sizes) != len(seconds):
        rule = f"hold as many arrays as `sizes`, {len(sizes)}"
        raise invalid(f"{owner}(seconds=...)", rule, len(seconds), "Give one per worker.")
    workers = enumerate(zip(sizes, seconds, strict=True))
    return [Points.of(*measured(owner, b, s, on=f" on rank {rank}")) for rank, (b, s) in workers]


def _fit(kind: Kind, owner: str, sizes: Sequence[IntArray], seconds: Sequence[FloatArray]) -> Any:
    points = points_of(owner, sizes, seconds)
    for rank, each in enumerate(points):
        if len(each.sizes) < kind.num_parameters:
            rule = f"hold at least {kind.num_parameters} different sizes on rank {rank}"
            remedy = "Measure more, or use `fit_affine`."
            raise invalid(f"{owner}(sizes=...)", rule, each.sizes.tolist(), remedy)
    return kind.of([kind.fit(each) for each in points])


def _affine(points: Points) -> Parameters:
    line = lines_through(points.sizes[None, :].astype(np.float64), points.seconds)
    return line.intercept[0], line.slope[0]


def _piecewise(points: Points) -> Parameters:
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
    return lines.intercept[best], knees[best], lines.slope[best]


def _past(knees: IntArray, points: Points) -> Lines:
    """Return the best lines through the samples past each knee."""
    past = np.maximum(points.sizes - knees[:, None], 0).astype(np.float64)
    return lines_through(past, points.seconds)


def _staircase(points: Points) -> Parameters:
    largest = int(points.sizes[-1])
    tiles = np.concatenate([np.arange(1, NUM_CANDIDATES + 1), 2 ** np.arange(9, 53)])
    tiles = tiles[tiles <= largest]
    in_tiles: NDArray[np.int64] = -(-points.sizes // tiles[:, None])
    lines = lines_through(in_tiles.astype(np.float64), points.seconds)
    best = first_best(lines.loss)
    return lines.intercept[best], lines.slope[best], tiles[best]


def _cubic(points: Points) -> Parameters:
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


AFFINE: Final = Kind("affine", 2, _affine, AffineTime)
PIECEWISE: Final = Kind("piecewise", 3, _piecewise, PiecewiseTime)
STAIRCASE: Final = Kind("staircase", 3, _staircase, StaircaseTime)
CUBIC: Final = Kind("cubic", 4, _cubic, CubicTime)
