"""Changes of the batch sizes: the largest of them, and how many there were."""

from __future__ import annotations

import heapq
from typing import final

import numpy as np

from .._types import IntArray
from ..events import Rebalanced
from ._run_figures import PlanChange
from ._step_bins import StepBins

MOST_CHANGES = 50


@final
class PlanChanges:
    """Keeps the ``MOST_CHANGES`` largest, by the samples that they move.

    Attributes:
        num: all of them.
    """

    def __init__(self, bins: StepBins) -> None:
        self.num = 0
        self._bins = bins
        self._by_stretch = bins.sums()
        self._largest: list[tuple[float, int, PlanChange]] = []
        self._sizes: tuple[int, ...] | None = None

    def begin(self, sizes: tuple[int, ...] | None) -> None:
        """Go on from ``sizes``, at a start; None is equal ones."""
        self._sizes = sizes

    def add(self, event: Rebalanced) -> None:
        """Take in the next change."""
        before = self._sizes
        if before is not None and len(before) != len(event.batch_size):
            before = None
        self._sizes = event.batch_size
        change = PlanChange(event, before, _moved(before, event.batch_size))
        entry = (change.moved_share, -self.num, change)
        if len(self._largest) < MOST_CHANGES:
            heapq.heappush(self._largest, entry)
        else:
            heapq.heappushpop(self._largest, entry)
        self.num += 1
        self._by_stretch.add(self._bins.at(np.array([event.step], np.int64)), np.ones((1, 1)))

    def largest(self) -> tuple[PlanChange, ...]:
        """Return those that were kept, in their order."""
        return tuple(change for _, _, change in sorted(self._largest, key=lambda one: -one[1]))

    def by_stretch(self, num_stretches: int) -> IntArray:
        """Return how many there were in each stretch."""
        nums: IntArray = self._by_stretch.values[:num_stretches].sum(axis=1).astype(np.int64)
        return nums


def _moved(before: tuple[int, ...] | None, after: tuple[int, ...]) -> float:
    """Return the part of the samples that another rank computes; of a first plan, from equal."""
    total = sum(after)
    if not total:
        return 0.0
    old = before or (total / len(after),) * len(after)
    return sum(abs(new - was) for new, was in zip(after, old, strict=True)) / 2 / total
