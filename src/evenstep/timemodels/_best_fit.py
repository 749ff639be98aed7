"""The kind of curve that foretells a profile best, worker by worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from .._types import FloatArray, IntArray
from ._base import AbstractTimeModel
from ._cubic import MOST
from ._fits import AFFINE, CUBIC, PIECEWISE, STAIRCASE, Kind, points_of
from ._joined import JoinedTime
from ._least_squares import Points

KINDS: Final = (AFFINE, PIECEWISE, STAIRCASE, CUBIC)
PENALTY: Final = 1.15
"""Factor on the error for each parameter: one more has to foretell that much better."""
FLOOR: Final = 2e-3
"""Relative error below which there is nothing to choose: no two steps are that much alike."""


@dataclass(frozen=True, slots=True, eq=False)
class BestFit:
    """What ``best_fit`` chose.

    Attributes:
        times: the workers' times: one model where all are of a kind, else a ``JoinedTime``.
        kinds: "affine", "piecewise", "staircase" or "cubic", one per rank.
        error: mean relative error at sizes left out of the fit, ``(world_size,)``. NaN for a
            worker with two sizes, where none can be left out.
    """

    times: AbstractTimeModel
    kinds: tuple[str, ...]
    error: FloatArray


def best_fit(sizes: Sequence[IntArray], seconds: Sequence[FloatArray]) -> BestFit:
    r"""Fit to every worker's profile the kind of curve that foretells it best.

    A kind with $k$ parameters, fitted to all sizes but one, foretells that one, for each size in
    turn. Chosen is the kind with the smallest $\max(e, 0.002) \cdot 1.15^k$, $e$ the mean
    relative error: of ``fit_affine``, ``fit_piecewise``, ``fit_staircase`` and ``fit_cubic`` in
    this order where they tie. It is then fitted to all sizes. A kind takes part with $k + 1$
    different sizes or more, so two sizes give a line.

    Right from some eight sizes on, each measured a few times, with three or more past a corner:
    one is left out, and two make a line. With fewer it takes a line, or a cubic that rounds the
    corner off. It chooses by how well the profile is met, and a curve that meets it may still
    mislead between its sizes (stairs hide from powers of two) and past them. Keep the cluster's
    `max_batch_size` near the largest size measured.

    Args:
        sizes: batch sizes measured, one ascending array per worker, as in ``Profile``. Lengths
            may differ, and repeats count by their median.
        seconds: what they took, likewise.

    Raises:
        ValueError: the two hold no or unlike numbers of workers, or what no ``Profile`` may hold;
            the message names the rank.

    Usage:
        found = best_fit([each.sizes for each in profiles], [each.seconds for each in profiles])
        allocate(found.times, cluster)

    References:
        M. Stone, *Cross-Validatory Choice and Assessment of Statistical Predictions*, J. Royal
        Statistical Society B 36, 1974. The factor for parameters is ours.
    """
    points = points_of("best_fit", sizes, seconds)
    chosen = [_choose(each) for each in points]
    kinds = tuple(kind.name for kind, _ in chosen)
    parts, ranks = [], []
    for kind in KINDS:
        held = [rank for rank, name in enumerate(kinds) if name == kind.name]
        if held:
            parts.append(kind.of([kind.fit(points[rank]) for rank in held]))
            ranks.append(np.array(held))
    times = parts[0] if len(parts) == 1 else JoinedTime(parts, ranks)
    return BestFit(times, kinds, np.array([error for _, error in chosen]))


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
        times = kind.of([kind.fit(points.without(index))])
        foretold_s = float(times.seconds(np.array([size]))[0])
        total += abs(foretold_s / actual_s - 1)
    return total / len(points.sizes)
