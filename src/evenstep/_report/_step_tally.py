"""Measured steps and accounts of steps, added up by stretch and by rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import final

import numpy as np

from .._types import FloatArray, IntArray
from ..events import StepMeasured, StepsAccounted

MOST_BINS = 512
"""Stretches at most; from half as many on they are as fine as a chart can show."""
PARTS = tuple(field.name for field in fields(StepsAccounted)[3:])
"""The parts of a step, in the order of ``StepsAccounted``."""


@final
class Stretches:
    """Tables by stretches of as many steps each, which double when the run has outgrown them.

    So a run of any length fits into the same memory, its length need not be known before, and
    every step counts. Steps before the first one that was reported count to the first stretch.

    Attributes:
        first: the step that the first stretch begins with; None before there was one.
        width: steps in each.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self.width = 1
        self._tables: dict[str, FloatArray] = {}
        self._how: dict[str, np.ufunc] = {}

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
            for name, how in self._how.items():
                pairs = how(self._tables[name][0::2], self._tables[name][1::2])
                rest = np.full_like(pairs, 0.0 if how is np.add else np.nan)
                self._tables[name] = np.concatenate([pairs, rest])
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

    def add(self, name: str, at: IntArray, values: FloatArray, how: np.ufunc = np.add) -> None:
        """Take rows into the stretches ``at`` of a table.

        Args:
            name: of the table; one of this name is made if need be.
            at: stretches, ``(rows,)``.
            values: ``(rows, columns)``, or ``(rows,)`` for one column.
            how: ``np.add``, or ``np.fmin`` or ``np.fmax``, which pass over NaN.
        """
        if not len(at):
            return
        self._how[name] = how
        rows = values.reshape(len(at), -1)
        starts = np.flatnonzero(np.diff(at, prepend=at[0] - 1))  # equal neighbours, all at once
        table = self.table(name, rows.shape[1], empty=0.0 if how is np.add else np.nan)
        how.at(table[:, : rows.shape[1]], at[starts], how.reduceat(rows, starts))
        self._tables[name] = table

    def table(self, name: str, num_columns: int = 1, *, empty: float = 0.0) -> FloatArray:
        """Return a table, ``(MOST_BINS, columns)`` with so many at least; ``empty`` in new ones."""
        table = self._tables.get(name, np.zeros((MOST_BINS, 0)))
        missing = num_columns - table.shape[1]
        if missing <= 0:
            return table
        return np.pad(table, ((0, 0), (0, missing)), constant_values=empty)

    def add_mean(self, name: str, at: IntArray, values: FloatArray, num: FloatArray) -> None:
        """Take ``num`` times a value, NaN where there is none, into the mean of a stretch."""
        both = [num * np.nan_to_num(values), num * ~np.isnan(values)]
        self.add(name, at, np.stack(both, axis=1))

    def mean(self, name: str) -> FloatArray:
        """Return a mean by stretch, NaN where there was no value."""
        sums, num = self.table(name, 2).T
        return over(sums, num)

    def add_range(self, name: str, at: IntArray, values: FloatArray) -> None:
        """Take values into the least and the most of a stretch; NaN is passed over."""
        self.add(f"least {name}", at, values, np.fmin)
        self.add(f"most {name}", at, values, np.fmax)

    def range(self, name: str) -> tuple[FloatArray, FloatArray]:
        """Return the least and the most by stretch, NaN where there was no value."""
        least, most = (self.table(f"{end} {name}", empty=np.nan) for end in ("least", "most"))
        return least[:, 0], most[:, 0]


def over(sums: FloatArray, by: FloatArray) -> FloatArray:
    """Return ``sums / by``, NaN where nothing is known."""
    quotients: FloatArray = np.divide(sums, by, out=np.full(sums.shape, np.nan), where=by > 0)
    return quotients


@final
class StepFigures:
    """Adds up ``StepMeasured``, many of them at a time; ``finish`` has to follow.

    Several short steps that were reported together count as many of their mean, spread over them.
    Arrays by stretch are ``(stretches,)`` and hold means over the steps that said it, NaN where
    none did. Those by rank and stretch are ``(stretches, world_size)``, those by rank alone
    ``(world_size,)``.

    Attributes:
        num_steps: those that were added.
        last_step: the highest of their numbers.
        num: measured steps in each stretch.
        wall_s, makespan_s: the whole step, and its slowest worker's computing.
        equal_s, best_s: what the equal and the best split would have computed.
        least_s, most_s: of whole steps; of computing where no whole step was measured.
        batch_size: of each rank, in the mean.
        samples_per_s: of each rank, its samples by its own seconds of computing.
        idle_share: what each rank waited for the slowest's computing, as a part of it.
        num_slowest: steps in which each rank was the slowest.
        caused_s: seconds that all others waited for each rank's computing.
        rank_samples, rank_compute_s: all of each rank.
        rank_idle_s: what each rank waited for the slowest's computing.
        elapsed_s: of all whole steps that were measured; one without its whole time counts with
            its slowest worker's computing.
        saved_s: what the equal split would have computed for longer, in all steps that know it.
        saved_share: the same as a part of the time that the equal split would have taken, in
            steps whose whole time is known. None without any.
        left_s: what the best split would have computed for less than what was.
        waiting_share: part of all ranks' computing time that they waited for the slowest.
    """

    def __init__(self, bins: Stretches) -> None:
        self.num_steps = self.last_step = 0
        self.elapsed_s = self.saved_s = self.left_s = 0.0
        self._bins = bins
        # Of the newest event: step, how many, computing, what equal adds.
        self._before = np.full((1, 4), np.nan)
        self._compared_s = self._compared_more_s = 0.0

    def add(self, events: Sequence[StepMeasured]) -> None:
        """Add steps of as many ranks each, in their order."""
        if not events:
            return
        bins = self._bins
        steps = np.array([event.step for event in events], np.int64)
        nums = np.array([event.num_steps for event in events], np.int64)
        samples = np.array([event.batch_size for event in events], np.float64)
        compute_s = np.where(samples > 0, [event.compute_s for event in events], 0.0)
        makespan_s = compute_s.max(axis=1)
        equal_s, best_s = _column(events, "equal_split_s"), _column(events, "best_split_s")
        row, at, part = bins.spread(steps, nums)
        weight = nums[row] * part
        self._add_ranks(at, samples[row], compute_s[row], weight)
        bins.add_mean("makespan", at, makespan_s[row], weight)
        bins.add_range("makespan", at, makespan_s[row])
        bins.add_mean("equal", at, equal_s[row], weight)
        bins.add_mean("best", at, best_s[row], weight)
        these = np.stack([steps, nums, makespan_s, equal_s - makespan_s], axis=1)
        self._add_whole(these, _column(events, "wall_s"))
        self.saved_s += float(np.nansum(nums * (equal_s - makespan_s)))
        self.left_s += float(np.nansum(nums * np.maximum(makespan_s - best_s, 0)))
        self.num_steps += int(nums.sum())
        self.last_step = max(self.last_step, int(steps.max()))

    def finish(self, num_stretches: int, world_size: int) -> None:
        """Have all attributes say what was added, by so many stretches and ranks."""
        bins, cut = self._bins, slice(num_stretches)
        samples, compute_s, idle_s, makespan_s, num, num_slowest, caused_s = (
            bins.table(name, world_size)[cut]  # some may have been lost before a step
            for name in ("samples", "compute", "idle", "possible", "num", "slowest", "caused")
        )
        self.wall_s, self.makespan_s = bins.mean("wall")[cut], bins.mean("makespan")[cut]
        self.equal_s, self.best_s = bins.mean("equal")[cut], bins.mean("best")[cut]
        self.num = np.rint(bins.table("makespan", 2)[cut, 1]).astype(np.int64)
        extent = "makespan" if np.isnan(self.wall_s).all() else "wall"
        self.least_s, self.most_s = (one[cut] for one in bins.range(extent))
        self.batch_size, self.samples_per_s = over(samples, num), over(samples, compute_s)
        self.idle_share = over(idle_s, makespan_s)
        self.num_slowest = np.rint(num_slowest.sum(axis=0)).astype(np.int64)
        self.caused_s = caused_s.sum(axis=0)
        self.rank_samples, self.rank_compute_s = samples.sum(axis=0), compute_s.sum(axis=0)
        self.rank_idle_s = idle_s.sum(axis=0)
        compared_s = self._compared_s + self._compared_more_s
        self.saved_share = self._compared_more_s / compared_s if compared_s > 0 else None
        self.waiting_share = float(idle_s.sum() / (makespan_s.sum() or 1.0))

    def _add_ranks(
        self, at: IntArray, samples: FloatArray, compute_s: FloatArray, num: FloatArray
    ) -> None:
        nums = np.broadcast_to(num[:, None], compute_s.shape)
        makespan_s = compute_s.max(axis=1, keepdims=True)
        idle_s = nums * (makespan_s - compute_s)
        is_slowest = np.zeros_like(idle_s)
        is_slowest[np.arange(len(at)), compute_s.argmax(axis=1)] = 1
        for name, values in {
            "samples": nums * samples,
            "compute": nums * compute_s,
            "idle": idle_s,
            "possible": nums * makespan_s,  # of steps that the rank was in
            "num": nums,
            "slowest": nums * is_slowest,
            "caused": is_slowest * idle_s.sum(axis=1, keepdims=True),
        }.items():
            self._bins.add(name, at, values)

    def _add_whole(self, these: FloatArray, wall_s: FloatArray) -> None:
        """Add whole steps: what they took is reported with those after them."""
        before = np.concatenate([self._before, these[:-1]])
        self._before = these[-1:]
        self.elapsed_s += float((these[:, 1] * these[:, 2]).sum())
        follows = (before[:, 0] + these[:, 1] == these[:, 0]) & ~np.isnan(wall_s)
        before, wall_s = before[follows], wall_s[follows]
        last, nums = before[:, :2].astype(np.int64).T
        row, at, part = self._bins.spread(last, nums)
        self._bins.add_mean("wall", at, wall_s[row], nums[row] * part)
        self._bins.add_range("wall", at, wall_s[row])
        self.elapsed_s += float((nums * (wall_s - before[:, 2])).sum())
        is_compared = ~np.isnan(before[:, 3])
        self._compared_s += float((nums * wall_s)[is_compared].sum())
        self._compared_more_s += float((nums * before[:, 3])[is_compared].sum())


def _column(events: Sequence[StepMeasured], name: str) -> FloatArray:
    """Return a field of every step, NaN where it is not known, or cannot be."""
    values = [getattr(event, name) for event in events]
    return np.array([math.nan if value is None or value < 0 else value for value in values])


@final
class AccountFigures:
    """Adds up ``StepsAccounted``, many of them at a time; ``finish`` has to follow.

    The time of several short steps that were reported together is spread evenly over them.

    Attributes:
        num_steps: steps that were accounted for.
        part_s: seconds of a step in each of ``PARTS``, mean over ranks, ``(stretches, parts)``.
        waiting_share: part of each rank's time that it waited, ``(stretches, world_size)``.
        rank_part_s: seconds of all steps, ``(world_size, parts)``.
    """

    def __init__(self, bins: Stretches) -> None:
        self.num_steps = 0
        self._bins = bins

    def add(self, events: Sequence[StepsAccounted]) -> None:
        """Add accounts of as many ranks each, in their order."""
        if not events:
            return
        num = np.array([event.num_steps for event in events], np.int64)
        last = np.array([event.step for event in events], np.int64)
        times_s = np.array([[getattr(event, part) for part in PARTS] for event in events])
        row, at, weight = self._bins.spread(last, num)
        part_s = times_s[row] * weight[:, None, None]
        self._bins.add("accounted", at, num[row] * weight * part_s.shape[2])
        # One after the other: all parts of a rank, then the next.
        self._bins.add("parts", at, part_s.transpose(0, 2, 1).reshape(len(row), -1))
        self.num_steps += int(num.sum())

    def finish(self, num_stretches: int, world_size: int) -> None:
        """Have all attributes say what was added, by so many stretches and ranks."""
        parts = self._bins.table("parts", world_size * len(PARTS))  # some ranks may be lost before
        by_rank = parts.reshape(MOST_BINS, -1, len(PARTS))
        num = self._bins.table("accounted")
        self.part_s = over(by_rank.sum(axis=1), np.tile(num, len(PARTS)))[:num_stretches]
        waiting_s, wall_s = by_rank[:, :, PARTS.index("waiting_s")], by_rank.sum(axis=2)
        self.waiting_share = over(waiting_s, wall_s)[:num_stretches]
        self.rank_part_s = by_rank.sum(axis=0)
