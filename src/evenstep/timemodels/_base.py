"""The interface every time model implements, and a search for those without a closed form."""

from __future__ import annotations

import abc
from collections.abc import Callable

import numpy as np

from .._types import FloatArray, IntArray


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
