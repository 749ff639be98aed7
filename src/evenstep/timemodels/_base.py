"""The interface every time model implements, its checks, and a search for the batch of a time."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from .._types import FloatArray, IntArray, check_ranks, fill, own
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
        name = "Profile(sizes=...)"
        counted = _array(name, sizes, "iu", "be a list of integers")
        _refuse(name, counted, counted < 1, "be at least 1", "Leave idle workers out.")
        falls = np.diff(counted, prepend=counted[:1]) < 0
        remedy = "Sort: `order = np.argsort(sizes, kind='stable')`, for both arrays."
        _refuse(name, counted, falls, "be ascending", remedy)
        if counted[0] == counted[-1]:
            remedy = "Measure another, best at twice the first."
            raise invalid(name, "hold at least two sizes", counted[:1].tolist(), remedy)

        name = "Profile(seconds=...)"
        timed = _array(name, seconds, "iuf", "be a list of numbers")
        alike(name, timed, other="sizes", like=counted, of="size")
        wrong = ~(np.isfinite(timed) & (timed > 0))
        remedy = "Leave out what failed, and synchronise the device before reading the clock."
        _refuse(name, timed, wrong, "be positive and finite", remedy)
        fill(self, sizes=own(counted, np.int64), seconds=own(timed, np.float64))


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


class AbstractTimeModel(abc.ABC):
    """Says how long every worker takes for any batch size.

    A model is an immutable value. Its times never fall as the batch grows. A worker without samples
    takes no time: ``seconds`` is 0 at a batch size of 0, even with a fixed cost. ``largest_batch``
    inverts ``seconds`` exactly, down to the last bit of a float; the solver relies on it.
    ``bisect_batch`` does that for a model without a closed form.
    """

    @property
    @abc.abstractmethod
    def world_size(self) -> int:
        """Number of workers of the model."""

    @abc.abstractmethod
    def seconds(self, batch_size: IntArray) -> FloatArray:
        """Return the finite times of ``batch_size`` samples, both ``(world_size,)``."""

    @abc.abstractmethod
    def largest_batch(self, budget_s: float, most: IntArray) -> IntArray:
        """Return the largest sizes, at most ``most``, that take no longer than ``budget_s``.

        0 where not a single sample fits the budget. ``most`` and the answer are ``(world_size,)``.
        """


def bisect_batch(
    seconds: Callable[[IntArray], FloatArray], budget_s: float, *, most: IntArray
) -> IntArray:
    """Invert a nondecreasing ``seconds`` by bisection, for all workers at once.

    Exact for whatever ``seconds`` returns, plateaus and jumps included; takes about
    ``log2(most)`` evaluations, where a closed form takes one or two.

    Args:
        seconds: nondecreasing in every entry, and 0 at 0, as in ``AbstractTimeModel``.
        budget_s: time that must not be passed.
        most: largest sizes to consider, at least 0, ``(world_size,)``.

    Returns:
        The largest sizes within the budget, 0 where there is none, ``(world_size,)``.

    Usage:
        def largest_batch(self, budget_s, most):
            return bisect_batch(self.seconds, budget_s, most=most)
    """
    fits = np.zeros_like(most)
    above = most + 1
    for _ in range(int(most.max(initial=0) + 1).bit_length()):
        mid = (fits + above) // 2
        ok = (mid > fits) & (seconds(mid) <= budget_s)
        fits, above = np.where(ok, mid, fits), np.where(ok, above, np.maximum(mid, fits + 1))
    return fits


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


def alike(
    argument: str, value: NDArray[Any], *, other: str, like: NDArray[Any], of: str = "worker"
) -> None:
    """Raise unless ``value`` has as many entries as ``like``, which is called ``other``."""
    if len(value) != len(like):
        rule = f"have the shape {like.shape} of `{other}`"
        raise invalid(argument, rule, value.shape, f"Give one value per {of}.")


def _per_worker(argument: str, value: NDArray[Any]) -> None:
    if value.ndim != 1 or not value.size:
        rule = "have shape (world_size,)"
        raise invalid(argument, rule, value.shape, "Give one value per worker.")
