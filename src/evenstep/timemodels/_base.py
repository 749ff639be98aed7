"""The interface every time model implements, its checks, and a search for the batch of a time."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._types import FloatArray, IntArray
from .._valid import check_ranks, own
from ..exceptions import invalid


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
