"""Checks on what a time model is made of."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._types import FloatArray, IntArray
from ..exceptions import invalid


def costs(argument: str, value: FloatArray) -> FloatArray:
    """Return seconds per worker as a read-only array of our own, finite and at least 0."""
    answer = np.array(value, np.float64)
    answer.flags.writeable = False
    _per_worker(argument, answer)
    valid = np.isfinite(answer) & (answer >= 0)
    if not valid.all():
        rank = int(np.argmin(valid))
        raise invalid(
            argument,
            "be finite and at least 0 on every rank",
            f"{answer[rank]} on rank {rank}",
            "Leave out what was not measured, and cut a fitted cost off at 0.",
        )
    return answer


def counts(argument: str, value: IntArray, *, least: int, most: int = 2**53) -> IntArray:
    """Return samples per worker as a read-only array of our own, from ``least`` to ``most``."""
    given = np.asarray(value)
    _per_worker(argument, given)
    if given.dtype.kind not in "iu":
        raise invalid(argument, "be integers", f"{given.dtype}", "Count whole samples.")
    valid = (given >= least) & (given <= most)
    if not valid.all():
        rank = int(np.argmin(valid))
        got = f"{given[rank]} on rank {rank}"
        raise invalid(argument, f"be in [{least}, {most}]", got, "Count whole samples.")
    answer = given.astype(np.int64)  # a copy
    answer.flags.writeable = False
    return answer


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
