"""Measured steps, added up by stretch and by rank."""

from __future__ import annotations

import math
from typing import final

import numpy as np

from .._types import FloatArray, IntArray
from ._event_rows import MeasuredRow, RowBlock
from ._run_figures import Savings, StepFigures
from ._step_bins import StepBins, over


@final
class StepTally:
    """Adds up ``StepMeasured``, blocks of them at a time.

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
            (1, 3), np.nan
        )  # of the newest step: number, computing, what equal adds
        self._elapsed_s = self._saved_s = self._left_s = 0.0
        self._compared_s = self._compared_more_s = 0.0

    def add(self, block: RowBlock[MeasuredRow]) -> None:
        """Add the steps of a block, in their order."""
        if not block.rows:
            return
        steps = np.array([row.step for row in block.rows], np.int64)
        samples = np.array([row.batch_size for row in block.rows], np.float64)
        compute_s = np.where(samples > 0, block.times_s[:, 0], 0.0)
        makespan_s = compute_s.max(axis=1)
        equal_s, best_s = _column(block, "equal_split_s"), _column(block, "best_split_s")
        at = self._bins.at(steps)
        self._add_ranks(at, samples, compute_s, makespan_s)
        self._computing.add(at, makespan_s)
        self._computing_range.add(at, makespan_s)
        self._equal.add(at, equal_s)
        self._best.add(at, best_s)
        self._add_whole(steps, _column(block, "wall_s"), makespan_s, equal_s - makespan_s)
        self._saved_s += float(np.nansum(equal_s - makespan_s))
        self._left_s += float(np.nansum(np.maximum(makespan_s - best_s, 0)))
        self.num_steps += len(steps)
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
            num=cut(self._computing.num).astype(np.int64),
            wall_s=cut(self._whole.mean),
            makespan_s=cut(self._computing.mean),
            equal_s=cut(self._equal.mean),
            best_s=cut(self._best.mean),
            least_s=cut(extent.least),
            most_s=cut(extent.most),
            batch_size=cut(over(self._samples.values, num)),
            samples_per_s=cut(over(self._samples.values, compute_s)),
            idle_share=cut(over(self._idle_s.values, self._makespan_s.values)),
            num_slowest=self._num_slowest.values.sum(axis=0).astype(np.int64),
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
        self, at: IntArray, samples: FloatArray, compute_s: FloatArray, makespan_s: FloatArray
    ) -> None:
        idle_s = makespan_s[:, None] - compute_s
        is_slowest = np.zeros_like(idle_s)
        is_slowest[np.arange(len(at)), compute_s.argmax(axis=1)] = 1
        self._samples.add(at, samples)
        self._compute_s.add(at, compute_s)
        self._idle_s.add(at, idle_s)
        self._makespan_s.add(at, np.broadcast_to(makespan_s[:, None], idle_s.shape))
        self._num.add(at, np.ones_like(idle_s))
        self._num_slowest.add(at, is_slowest)
        self._caused_s.add(at, is_slowest * idle_s.sum(axis=1, keepdims=True))

    def _add_whole(
        self, steps: IntArray, wall_s: FloatArray, makespan_s: FloatArray, more_s: FloatArray
    ) -> None:
        """Add whole steps: what a step took is told with the one after it."""
        these = np.stack([steps, makespan_s, more_s], axis=1)
        before = np.concatenate([self._before, these[:-1]])
        self._before = these[-1:]
        follows = (before[:, 0] + 1 == steps) & ~np.isnan(wall_s)
        before, wall_s = before[follows], wall_s[follows]
        at = self._bins.at(before[:, 0].astype(np.int64))
        self._whole.add(at, wall_s)
        self._whole_range.add(at, wall_s)
        self._elapsed_s += float(makespan_s.sum() + (wall_s - before[:, 1]).sum())
        is_compared = ~np.isnan(before[:, 2])
        self._compared_s += float(wall_s[is_compared].sum())
        self._compared_more_s += float(before[is_compared, 2].sum())


class _Mean:
    """The mean by stretch of what some steps tell; NaN stands for those that do not."""

    def __init__(self, bins: StepBins) -> None:
        self._sums, self._nums = bins.sums(), bins.sums()

    def add(self, at: IntArray, values: FloatArray) -> None:
        self._sums.add(at, np.nan_to_num(values)[:, None])
        self._nums.add(at, (~np.isnan(values)).astype(np.float64)[:, None])

    @property
    def num(self) -> FloatArray:
        nums: FloatArray = self._nums.values[:, :1].sum(axis=1)
        return nums

    @property
    def mean(self) -> FloatArray:
        return over(self._sums.values[:, :1].sum(axis=1), self.num)


def _column(block: RowBlock[MeasuredRow], name: str) -> FloatArray:
    """Return a field of every step, NaN where it is not known, or cannot be."""
    values = [row.rest.get(name) for row in block.rows]
    return np.array([value if _is_time(value) else math.nan for value in values], np.float64)


def _is_time(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf  # type: ignore[operator]
