"""Checks on what a time model is made of."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._types import FloatArray, IntArray
from .._valid import check_ranks, own
from ..exceptions import invalid


def costs(argument: str, value: FloatArray) -> FloatArray:
    """Return seconds per worker as a read-only array of our own, finite and at least 0."""
    answer = own(value, np.float64)
    _per_worker(argument, answer)
    remedy = "Leave out what was not measured, and cut a fitted cost off at 0."
    valid = np.isfinite(answer) & (answer >= 0)
    check_ranks(argument, answer, valid, "be finite and at least 0", remedy)
    return answer


def counts(argument: str, value: IntArray, *, least: int, most: int = 2**53) -> IntArray:
    """Return samples per worker as a read-only array of our own, from ``least`` to ``most``."""
    given = np.asarray(value)
    _per_worker(argument, given)
    if given.dtype.kind not in "iu":
        raise invalid(argument, "be integers", f"{given.dtype}", "Count whole samples.")
    valid = (given >= least) & (given <= most)
    check_ranks(argument, given, valid, f"be in [{least}, {most}]", "Count whole samples.")
    return own(given, np.int64)


def alike(argument: str, value: NDArray[Any], *, other: str, like: NDArray[Any]) -> None:
    """Raise unless ``value`` speaks of as many workers as ``like``, which is called ``other``."""
    if len(value) != len(like):
        raise invalid(
            argument,
            f"have the shape {like.shape} of `{other}`",
            value.shape,
            "Give one value per worker.",
        )


def _per_worker(argument: str, value: NDArray[Any]) -> None:
    if value.ndim != 1 or not value.size:
        rule = "have shape (world_size,)"
        raise invalid(argument, rule, value.shape, "Give one value per worker.")
