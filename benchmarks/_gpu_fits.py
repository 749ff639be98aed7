"""What time and memory models say of sizes that they were not fitted to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from evenstep import AffineTime
from evenstep._types import FloatArray, IntArray
from evenstep.timemodels import (
    AbstractTimeModel,
    CostEstimator,
    CubicTime,
    PiecewiseTime,
    Profile,
    TableTime,
)
from evenstep.timemodels._least_squares import lines_through, points_of
from evenstep.timemodels._memory_model import MemoryModel

Errors = dict[str, float]


def fit_errors(sizes: Sequence[int], seconds: Sequence[float]) -> dict[str, dict[str, Any]]:
    """Return the relative errors of every time model at sizes that were left out of its fit.

    ``"between"``: a third of the sizes, drawn, none of them the first or the last. ``"beyond"``:
    the sizes past half of the largest, fitted to those below; the table says nothing there.
    An entry is None where too few sizes are left for a fit.

    Args:
        sizes: ascending, at least 2.
        seconds: what they took.
    """
    counted, took = np.array(sizes), np.array(seconds)
    inner = np.arange(1, len(counted) - 1)
    drawn = np.random.default_rng(0).permutation(inner)[: max(len(inner) // 3, 1)]
    between = np.isin(np.arange(len(counted)), drawn)
    beyond = counted > counted[-1] / 2
    found: dict[str, dict[str, Any]] = {}
    for name, fitted in _FITS.items():
        found[name] = {
            "between": _error(fitted, counted, took, between),
            "beyond": None if name == "table" else _error(fitted, counted, took, beyond),
        }
    return found


def _error(
    fitted: Callable[[Profile, int], AbstractTimeModel],
    sizes: IntArray,
    seconds: FloatArray,
    left_out: np.ndarray[Any, np.dtype[np.bool_]],
) -> Errors | None:
    """Return the errors at the sizes that were left out; None where a fit needs more sizes."""
    if not left_out.any() or (~left_out).sum() < _LEAST:
        return None
    model = fitted(Profile(sizes[~left_out], seconds[~left_out]), int(sizes[-1]))
    told = [float(model.seconds(np.array([size]))[0]) for size in sizes[left_out]]
    return _summary(np.array(told), seconds[left_out])


def _summary(told: FloatArray, real: FloatArray) -> Errors:
    off = abs(told / real - 1)
    return {"median": float(np.median(off)), "max": float(off.max()), "num": len(off)}


def _line(profile: Profile, largest: int) -> AffineTime:
    (points,) = points_of([profile], least=2, where="Profile(sizes=...)")
    line = lines_through(points.sizes[None, :].astype(np.float64), points.seconds)
    return AffineTime(line.intercept, line.slope)


def _table(profile: Profile, largest: int) -> TableTime:
    """Return the table of straight lines from point to point, which never fall."""
    table = np.interp(np.arange(1, largest + 1), profile.sizes, profile.seconds)
    return TableTime(np.maximum.accumulate(np.concatenate([[0.0], table]))[None])


_LEAST: Final = 4  # sizes that the cubic needs
_FITS: Final[dict[str, Callable[[Profile, int], AbstractTimeModel]]] = {
    "affine": _line,
    "piecewise": lambda profile, largest: PiecewiseTime.fitted([profile]),
    "cubic": lambda profile, largest: CubicTime.fitted([profile]),
    "table": _table,
}


def cost_errors(
    sizes: Sequence[int], lengths: Sequence[int], seconds: Sequence[float]
) -> dict[str, Errors]:
    """Return the errors of a ``CostEstimator`` at drawn points, by cost, and by count alone.

    Features of a batch of n sequences of length L are n, n L and n L squared.
    """
    num, length, took = np.array(sizes), np.array(lengths), np.array(seconds)
    features = (num[:, None] * np.stack([np.ones_like(length), length, length**2], 1))[:, None]
    order = np.random.default_rng(0).permutation(len(num))
    left_out, shown = order[: max(len(order) // 3, 1)], order[max(len(order) // 3, 1) :]
    estimator = CostEstimator.fresh(num_features=3, kinds=[0])
    for point in shown:
        estimator = estimator.observe(features[point], num[point, None], took[point, None])
    assert estimator.model is not None
    assert estimator.by_count is not None
    real = took[left_out]
    return {
        "by_cost": _summary(estimator.model.seconds(features[left_out])[:, 0], real),
        "by_count": _summary(
            estimator.by_count.seconds(num[left_out][:, None, None].astype(float))[:, 0], real
        ),
    }


def memory_errors(sizes: Sequence[int], peak_bytes: Sequence[int]) -> dict[str, Any] | None:
    """Return how peaks of memory keep to a line, and what the model of memory makes of them.

    ``line`` holds the relative errors of a line through the sizes up to half of the largest, at
    those past it. ``cap`` is the size that ``MemoryModel`` allows where the largest size would just
    have fitted, after it has seen the others up to half of it: above 1 it would run out.

    Returns:
        None where no peaks are known, or those of fewer than four sizes.
    """
    counted, peaks = np.array(sizes), np.array(peak_bytes)
    if len(counted) < _LEAST or not peaks.all():
        return None
    seen = counted <= counted[-1] / 2
    slope, intercept = np.polyfit(counted[seen], peaks[seen], 1)
    model = MemoryModel()
    state = model.init(1)
    for size, peak in zip(counted[seen], peaks[seen], strict=True):
        state = model.update(state, np.array([size]), np.array([peak]), peaks[-1:])
    cap = int(model.caps(state, np.array([counted[-1]]))[0])
    return {
        "line": _summary(intercept + slope * counted[~seen], peaks[~seen]),
        "bytes_per_sample": float(slope),
        "cap_over_largest": cap / int(counted[-1]),
    }
