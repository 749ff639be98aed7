"""Measured steps and accounts of steps, added up by stretch and by rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from .._types import FloatArray, IntArray
from ..events import StepMeasured, StepsAccounted
from ._run_figures import PARTS, AccountFigures, Savings, StepFigures

MOST_BINS = 512
"""Stretches at most; from half as many on they are as fine as a chart can show."""


@final
class StepBins:
    """Stretches of as many steps each, which double when the run has outgrown them.

    So a run of any length fits into the same memory, its length need not be known before, and
    every step counts. Steps before the first one that was reported count to the first stretch.

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


@final
class StepTally:
    """Adds up ``StepMeasured``, many of them at a time.

    Several short steps that were reported together count as many of their mean, spread over them.

    Attributes:
        num_steps: those that were added.
        last_step: the highest of their numbers.
    """

    def __init__(self, bins: StepBins) -> None:
        self.num_steps = self.last_step = 0
        self._bins = bins
        self._whole, self._computing = _Mean(bins), _Mean(bins)
        self._equal, self._best = _Mean(bins), _Mean(bins)
        self._whole_range, self._computing_range = bins.range(), bins.range()
        self._samples, self._compute_s, self._idle_s = bins.sums(), bins.sums(), bins.sums()
        self._makespan_s, self._num = bins.sums(), bins.sums()  # of steps that the rank was in
        self._num_slowest, self._caused_s = bins.sums(), bins.sums()
        self._before = np.full(
            (1, 4), np.nan
        )  # of the newest event: step, how many, computing, what equal adds
        self._elapsed_s = self._saved_s = self._left_s = 0.0
        self._compared_s = self._compared_more_s = 0.0

    def add(self, events: Sequence[StepMeasured]) -> None:
        """Add steps of as many ranks each, in their order."""
        if not events:
            return
        steps = np.array([event.step for event in events], np.int64)
        nums = np.array([event.num_steps for event in events], np.int64)
        samples = np.array([event.batch_size for event in events], np.float64)
        compute_s = np.where(samples > 0, [event.compute_s for event in events], 0.0)
        makespan_s = compute_s.max(axis=1)
        equal_s, best_s = _column(events, "equal_split_s"), _column(events, "best_split_s")
        row, at, part = self._bins.spread(steps, nums)
        weight = nums[row] * part
        self._add_ranks(at, samples[row], compute_s[row], weight)
        self._computing.add(at, makespan_s[row], weight)
        self._computing_range.add(at, makespan_s[row])
        self._equal.add(at, equal_s[row], weight)
        self._best.add(at, best_s[row], weight)
        these = np.stack([steps, nums, makespan_s, equal_s - makespan_s], axis=1)
        self._add_whole(these, _column(events, "wall_s"))
        self._saved_s += float(np.nansum(nums * (equal_s - makespan_s)))
        self._left_s += float(np.nansum(nums * np.maximum(makespan_s - best_s, 0)))
        self.num_steps += int(nums.sum())
        self.last_step = max(self.last_step, int(steps.max()))

    def figures(self, num_stretches: int, world_size: int) -> StepFigures:
        """Return all of it, by so many stretches and ranks."""
        for by_rank in (
            self._samples, self._compute_s, self._idle_s, self._makespan_s, self._num,
            self._num_slowest, self._caused_s,
        ):  # fmt: skip
            by_rank.widen(world_size)  # some may have been lost before a step

        def cut(table: FloatArray) -> FloatArray:
            return table[:num_stretches]

        is_whole_known = not np.isnan(self._whole_range.most).all()
        extent = self._whole_range if is_whole_known else self._computing_range
        num, compute_s = self._num.values, self._compute_s.values
        return StepFigures(
            num=cut(np.rint(self._computing.num)).astype(np.int64),
            wall_s=cut(self._whole.mean),
            makespan_s=cut(self._computing.mean),
            equal_s=cut(self._equal.mean),
            best_s=cut(self._best.mean),
            least_s=cut(extent.least),
            most_s=cut(extent.most),
            batch_size=cut(over(self._samples.values, num)),
            samples_per_s=cut(over(self._samples.values, compute_s)),
            idle_share=cut(over(self._idle_s.values, self._makespan_s.values)),
            num_slowest=np.rint(self._num_slowest.values.sum(axis=0)).astype(np.int64),
            caused_s=self._caused_s.values.sum(axis=0),
            rank_samples=self._samples.values.sum(axis=0),
            rank_compute_s=compute_s.sum(axis=0),
            rank_idle_s=self._idle_s.values.sum(axis=0),
        )

    def savings(self) -> Savings:
        """Return what balancing brought, and what is left."""
        compared_s = self._compared_s + self._compared_more_s
        possible_s = float(self._makespan_s.values.sum())
        return Savings(
            elapsed_s=self._elapsed_s,
            saved_s=self._saved_s,
            saved_share=self._compared_more_s / compared_s if compared_s > 0 else None,
            left_s=self._left_s,
            idle_share=float(self._idle_s.values.sum()) / possible_s if possible_s else 0.0,
        )

    def _add_ranks(
        self, at: IntArray, samples: FloatArray, compute_s: FloatArray, num: FloatArray
    ) -> None:
        nums = np.broadcast_to(num[:, None], compute_s.shape)
        makespan_s = compute_s.max(axis=1, keepdims=True)
        idle_s = nums * (makespan_s - compute_s)
        is_slowest = np.zeros_like(idle_s)
        is_slowest[np.arange(len(at)), compute_s.argmax(axis=1)] = 1
        self._samples.add(at, nums * samples)
        self._compute_s.add(at, nums * compute_s)
        self._idle_s.add(at, idle_s)
        self._makespan_s.add(at, nums * makespan_s)
        self._num.add(at, nums)
        self._num_slowest.add(at, nums * is_slowest)
        self._caused_s.add(at, is_slowest * idle_s.sum(axis=1, keepdims=True))

    def _add_whole(self, these: FloatArray, wall_s: FloatArray) -> None:
        """Add whole steps: what they took is reported with those after them."""
        before = np.concatenate([self._before, these[:-1]])
        self._before = these[-1:]
        self._elapsed_s += float((these[:, 1] * these[:, 2]).sum())
        follows = (before[:, 0] + these[:, 1] == these[:, 0]) & ~np.isnan(wall_s)
        before, wall_s = before[follows], wall_s[follows]
        last, nums = before[:, :2].astype(np.int64).T
        row, at, part = self._bins.spread(last, nums)
        self._whole.add(at, wall_s[row], nums[row] * part)
        self._whole_range.add(at, wall_s[row])
        self._elapsed_s += float((nums * (wall_s - before[:, 2])).sum())
        is_compared = ~np.isnan(before[:, 3])
        self._compared_s += float((nums * wall_s)[is_compared].sum())
        self._compared_more_s += float((nums * before[:, 3])[is_compared].sum())


class _Mean:
    """The mean by stretch of what some steps report; NaN stands for those that do not."""

    def __init__(self, bins: StepBins) -> None:
        self._sums, self._nums = bins.sums(), bins.sums()

    def add(self, at: IntArray, values: FloatArray, num: FloatArray) -> None:
        self._sums.add(at, (num * np.nan_to_num(values))[:, None])
        self._nums.add(at, (num * ~np.isnan(values))[:, None])

    @property
    def num(self) -> FloatArray:
        nums: FloatArray = self._nums.values[:, :1].sum(axis=1)
        return nums

    @property
    def mean(self) -> FloatArray:
        return over(self._sums.values[:, :1].sum(axis=1), self.num)


def _column(events: Sequence[StepMeasured], name: str) -> FloatArray:
    """Return a field of every step, NaN where it is not known, or cannot be."""
    values = [getattr(event, name) for event in events]
    return np.array([math.nan if value is None or value < 0 else value for value in values])


@final
class AccountTally:
    """Adds up ``StepsAccounted``, many of them at a time.

    The time of several short steps that were reported together is spread evenly over them.

    Attributes:
        num_steps: steps that were accounted for.
    """

    def __init__(self, bins: StepBins) -> None:
        self.num_steps = 0
        self._bins = bins
        self._part_s, self._rank_steps = bins.sums(), bins.sums()
        self._waiting_s, self._wall_s = bins.sums(), bins.sums()
        self._by_rank = bins.sums()  # one after the other: all parts of a rank, then the next

    def add(self, events: Sequence[StepsAccounted]) -> None:
        """Add accounts of as many ranks each, in their order."""
        if not events:
            return
        num = np.array([event.num_steps for event in events], np.int64)
        last = np.array([event.step for event in events], np.int64)
        times_s = np.array([[getattr(event, part) for part in PARTS] for event in events])
        row, at, weight = self._bins.spread(last, num)
        part_s = times_s[row] * weight[:, None, None]
        wall_s = part_s.sum(axis=1)
        self._part_s.add(at, part_s.sum(axis=2))
        self._rank_steps.add(at, (num[row] * weight)[:, None] * wall_s.shape[1])
        self._waiting_s.add(at, part_s[:, PARTS.index("waiting_s")])
        self._wall_s.add(at, wall_s)
        self._by_rank.add(at, part_s.transpose(0, 2, 1).reshape(len(row), -1))
        self.num_steps += int(num.sum())

    def figures(self, num_stretches: int, world_size: int) -> AccountFigures:
        """Return all of it, by so many stretches and ranks."""
        self._waiting_s.widen(world_size)  # some ranks may have been lost before an account
        self._wall_s.widen(world_size)
        self._by_rank.widen(world_size * len(PARTS))
        part_s, num = self._part_s.values[:num_stretches], self._rank_steps.values[:num_stretches]
        waiting = over(self._waiting_s.values, self._wall_s.values)[:num_stretches]
        return AccountFigures(
            part_s=over(part_s, np.broadcast_to(num, part_s.shape)),
            waiting_share=waiting,
            rank_part_s=self._by_rank.values.sum(axis=0).reshape(-1, len(PARTS)),
            num_steps=self.num_steps,
        )
