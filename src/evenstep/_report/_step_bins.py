"""Sums over stretches of steps, of which there are never more than so many."""

from __future__ import annotations

from typing import Any, final

import numpy as np

from .._types import FloatArray, IntArray

MOST_BINS = 512
"""Stretches at most; from half as many on they are as fine as a chart can show."""


@final
class StepBins:
    """Stretches of as many steps each, which double when the run has outgrown them.

    So a run of any length fits into the same memory, its length need not be known before, and
    every step counts. Steps before the first one that was told count to the first stretch.

    Attributes:
        first: the step that the first stretch begins with; None before there was one.
        width: steps in each.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self.width = 1
        self._tables: list[BinnedSums | BinnedRange] = []

    def begin(self, step: int) -> None:
        """Have the first stretch begin with ``step``, unless it has begun."""
        if self.first is None:
            self.first = step

    def at(self, steps: IntArray) -> IntArray:
        """Return the stretch of every step, after making room for them."""
        if not len(steps):
            return steps
        self.begin(int(steps.min()))
        past = np.maximum(steps - (self.first or 0), 0)
        while past.max() // self.width >= MOST_BINS:
            self.width *= 2
            for table in self._tables:
                table.halve()
        return past // self.width

    def spread(self, last: IntArray, num: IntArray) -> tuple[IntArray, IntArray, FloatArray]:
        """Return the stretches that events of several steps reach into, and the part there of each.

        Args:
            last: newest step of each event.
            num: its steps, in a row.

        Returns:
            An index of an event, a stretch and a part in [0, 1], each as often as events reach
            into stretches.
        """
        end = self.at(last)
        begin = np.minimum(self.at(np.maximum(last - num + 1, 0)), end)
        reach = end - begin + 1
        row = np.repeat(np.arange(len(last)), reach)
        at = begin[row] + np.arange(len(row)) - np.repeat(np.cumsum(reach) - reach, reach)
        start = (self.first or 0) + at * self.width
        until = np.minimum(start + self.width, last[row] + 1)
        overlap = np.maximum(until - np.maximum(start, last[row] - num[row] + 1), 0)
        total = np.bincount(row, overlap, len(last))[row]
        return row, at, np.where(total > 0, overlap / np.maximum(total, 1), 1 / reach[row])

    def sums(self) -> BinnedSums:
        """Return a table of sums for these stretches, empty."""
        table = BinnedSums()
        self._tables.append(table)
        return table

    def range(self) -> BinnedRange:
        """Return a table of the least and the most for these stretches, empty."""
        table = BinnedRange()
        self._tables.append(table)
        return table


@final
class BinnedSums:
    """Sums by stretch and column; columns are added as they come.

    Attributes:
        values: ``(MOST_BINS, columns)``.
    """

    def __init__(self) -> None:
        self.values: FloatArray = np.zeros((MOST_BINS, 0))

    def add(self, at: IntArray, values: FloatArray) -> None:
        """Add rows ``(rows, columns)`` to the stretches ``at``."""
        if not len(at):
            return
        self.widen(values.shape[1])
        starts = _runs(at)
        sums = np.add.reduceat(values, starts)
        for stretch, row in zip(at[starts].tolist(), sums, strict=True):
            self.values[stretch, : len(row)] += row

    def widen(self, num_columns: int) -> None:
        """Have so many columns at least, new ones of zeros."""
        missing = num_columns - self.values.shape[1]
        if missing > 0:
            self.values = np.pad(self.values, ((0, 0), (0, missing)))

    def halve(self) -> None:
        """Make one stretch of two."""
        pairs = self.values[0::2] + self.values[1::2]
        self.values = np.concatenate([pairs, np.zeros_like(pairs)])


@final
class BinnedRange:
    """The least and the most of one quantity by stretch; NaN stands where there was none.

    Attributes:
        least, most: ``(MOST_BINS,)``.
    """

    def __init__(self) -> None:
        self.least: FloatArray = np.full(MOST_BINS, np.nan)
        self.most: FloatArray = np.full(MOST_BINS, np.nan)

    def add(self, at: IntArray, values: FloatArray) -> None:
        """Take in values, one for each of the stretches ``at``; NaN is passed over."""
        if len(at):
            starts = _runs(at)
            np.fmin.at(self.least, at[starts], np.fmin.reduceat(values, starts))
            np.fmax.at(self.most, at[starts], np.fmax.reduceat(values, starts))

    def halve(self) -> None:
        """Make one stretch of two."""
        rest = np.full(MOST_BINS // 2, np.nan)
        self.least = np.concatenate([np.fmin(self.least[0::2], self.least[1::2]), rest])
        self.most = np.concatenate([np.fmax(self.most[0::2], self.most[1::2]), rest])


def _runs(at: IntArray) -> Any:
    """Return where equal neighbours begin."""
    return np.flatnonzero(np.diff(at, prepend=at[0] - 1))


def over(sums: FloatArray, by: FloatArray) -> FloatArray:
    """Return ``sums / by``, NaN where nothing is known."""
    quotients: FloatArray = np.divide(sums, by, out=np.full(sums.shape, np.nan), where=by > 0)
    return quotients
