"""What one worker's profile measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from .._types import FloatArray, IntArray
from .._valid import own
from ..exceptions import invalid


@final
@dataclass(frozen=True, slots=True, eq=False, init=False)
class Profile:
    """Times of one worker at several batch sizes, from which time models are ``fitted``.

    Args:
        sizes: samples of each measurement, integers of at least 1, ascending, ``(num,)``. Repeats
            are welcome, and at least two sizes are needed: one shows no curve.
        seconds: the time of each, positive and finite, ``(num,)``.

    Attributes:
        sizes, seconds: read-only arrays, copies of what was given.

    Raises:
        ValueError: an argument has another shape or type, is out of range or out of order.
    """

    sizes: IntArray
    seconds: FloatArray

    def __init__(
        self,
        sizes: Sequence[int] | IntArray,
        seconds: Sequence[float] | FloatArray,
    ) -> None:
        counted, timed = _measured(sizes, seconds)
        values = {"sizes": counted, "seconds": timed}
        for name, value in values.items():
            object.__setattr__(self, name, value)  # past the frozen guard, as a generated one goes


def _measured(sizes: Any, seconds: Any) -> tuple[IntArray, FloatArray]:
    """Return one worker's measurements as read-only arrays of our own."""
    name = "Profile(sizes=...)"
    counted = _array(name, sizes, "iu", "be a list of integers")
    _refuse(name, counted, counted < 1, "be at least 1", "Leave idle workers out.")
    falls = np.diff(counted, prepend=counted[:1]) < 0
    remedy = "Sort: `order = np.argsort(sizes, kind='stable')`, for both arrays."
    _refuse(name, counted, falls, "be ascending", remedy)
    if len(np.unique(counted)) < 2:
        remedy = "Measure another, best at twice the first."
        raise invalid(name, "hold at least two sizes", np.unique(counted).tolist(), remedy)

    name = "Profile(seconds=...)"
    timed = _array(name, seconds, "iuf", "be a list of numbers")
    if timed.shape != counted.shape:
        rule = f"have the shape {counted.shape} of `sizes`"
        raise invalid(name, rule, timed.shape, "Give one time per size.")
    wrong = ~(np.isfinite(timed) & (timed > 0))
    remedy = "Leave out what failed, and synchronise the device before reading the clock."
    _refuse(name, timed, wrong, "be positive and finite", remedy)
    return own(counted, np.int64), own(timed, np.float64)


def _array(name: str, value: Any, kinds: str, rule: str) -> NDArray[Any]:
    """Return ``value`` as an array of one dimension and one of the ``kinds`` of numpy."""
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError):
        array = np.empty((), object)  # ragged, say
    if array.ndim != 1 or not array.size or array.dtype.kind not in kinds:
        raise invalid(name, rule, repr(value)[:60], "Give one per measurement.")
    return array


def _refuse(
    name: str, value: NDArray[Any], wrong: NDArray[np.bool_], rule: str, remedy: str
) -> None:
    if wrong.any():
        at = int(np.argmax(wrong))
        raise invalid(name, rule, f"{value[at]} as measurement {at}", remedy)
