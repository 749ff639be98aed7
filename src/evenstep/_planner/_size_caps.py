"""How large a forward may be where samples are assigned by cost: tokens in the place of samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np

from .._types import IntArray
from ..events import Event
from ..timemodels._memory_model import UNSEEN, MemoryModel
from ._memory_caps import KnownMemory, capped, tells_peaks
from ._report import Report
from ._sample_costs import SampleCosts

_FALL = 32  # a cap that falls does so by that part of it more, so that it does not soon again
_RISE = 1.25  # times a cap, from which on a larger one takes its place


@final
class SizeCaps:
    """The most that one forward of every rank may have of what ``Cost(max_size=...)`` counts.

    That is the sum of the lengths or, where they are padded, the longest times their number. The
    smallest holds of three, as for samples (``MemoryCaps``): the cap that was given, those modelled
    from the peaks of the forwards visited, and those found by running out of memory.

    Every step has forwards of other sizes, and each moves the model a little. So a cap falls at
    once, by a little more, and rises where a quarter or more is gained. A single sample cannot be
    cut: up to the longest one, no rank has to grow in steps. What its model says of so much memory
    holds.

    Args:
        world_size: number of ranks.
        costs: of the samples.
        memory: how peaks become caps.
    """

    def __init__(self, world_size: int, costs: SampleCosts, memory: MemoryModel) -> None:
        self._costs = costs
        self._known = KnownMemory(world_size, memory, UNSEEN)
        self._given = np.full(world_size, costs.cost.max_size or UNSEEN)
        self._caps = self._given
        self._mean = 1  # size of a sample, the largest of a step so far

    @property
    def caps(self) -> IntArray | None:
        """Those in force, ``(world_size,)``; None where there are none beside the one given.

        Before lengths are known, forwards are cut by count: caps are as many samples as have that
        size by the largest mean of a step so far.
        """
        if not (self._caps < self._given).any():
            return None
        return self._caps if self._costs.is_known else np.maximum(self._caps // self._mean, 1)

    @property
    def peaks(self) -> Any:
        """What the steps so far have taught about memory, for ``restore``."""
        return self._known.peaks

    def restore(self, peaks: Any, former: IntArray) -> None:
        """Take in peaks of forwards of the same data, of workers at other ranks perhaps."""
        if self._known.restore(peaks, former):
            self._caps = self._modelled()

    def observe(self, reports: Sequence[Report]) -> list[Event]:
        """Take in the peaks of a step, and what ranks found not to fit.

        A rank without samples has a stand-in, of whose size nothing is known.
        """
        works = [report.work.own for report in reports if report.work is not None]
        num, size = [sum(own[at] for own in works) for at in (0, 1)]
        self._mean = max(self._mean, -(-size // max(num, 1)))
        is_new = self._known.limited(reports)
        if tells_peaks(reports):
            largest = np.array([report.largest_forward for report in reports])
            self._known.measured(reports, largest)
        elif not is_new:
            return []
        modelled, before = self._modelled(), self._caps
        falls = modelled < before
        lower = np.where(before < self._given, modelled - modelled // _FALL, modelled)
        higher = np.where(modelled >= _RISE * before, modelled, before)
        self._caps = np.where(falls, lower, higher)
        return capped(reports, np.flatnonzero(self._caps != before), self._caps, unit="size")

    def hold(self, counts: IntArray) -> bool:
        """Tell whether so many samples of each rank keep to the caps, whichever they are."""
        caps = self.caps
        return caps is None or bool((counts * self._costs.most[1] <= caps).all())

    def _modelled(self) -> IntArray:
        longest = int(self._costs.most[1]) if self._costs.is_known else 0
        return self._known.caps(self._given, at_least=longest)
