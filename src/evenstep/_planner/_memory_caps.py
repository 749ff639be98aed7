"""What fits on every worker, in samples or tokens: as given, as modelled, as found by trial."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np

from .._types import IntArray
from ..events import Event, MemoryCapped, SizesHeld
from ..timemodels._memory_model import UNSEEN, MemoryModel
from ._job import Job
from ._learnt import columns
from ._plan import Plan, Report
from ._sample_costs import SampleCosts


class KnownMemory:
    """What workers have reported of their memory: in samples, or in what ``Cost`` counts.

    The peaks of the sizes visited, and what was found not to fit, by trial or by running out.

    Args:
        world_size: number of workers.
        memory: how peaks become caps.
        most: no forward is larger.

    Attributes:
        peaks: what the steps so far have taught, of each size visited.
    """

    def __init__(self, world_size: int, memory: MemoryModel, most: int) -> None:
        self._memory = memory
        self.peaks = memory.init(world_size)
        self._limits = np.full(world_size, most)

    def take_back(self, peaks: Any, former: IntArray) -> bool:
        """Take in peaks from before, of workers at other ranks; return whether there were any."""
        self.peaks = columns(peaks, self._memory.init(len(self._limits)), former, axis=0)
        return bool((self.peaks[0] > 0).any())

    def take_peaks(self, reports: Sequence[Report], largest: IntArray) -> None:
        """Take in the peaks of a step.

        Args:
            reports: of the step.
            largest: size of the largest forward of each rank, whose the peak was.
        """
        peaks = np.array([report.peak_bytes for report in reports])
        self.peaks = self._memory.update(self.peaks, largest, peaks, capacity_of(reports))

    def take_limits(self, reports: Sequence[Report]) -> bool:
        """Take in what workers found not to fit; return whether that is news."""
        if not any(report.limit for report in reports):
            return False
        known = self._limits.tolist()
        found = [report.limit or limit for report, limit in zip(reports, known, strict=True)]
        self._limits = np.minimum(self._limits, found)
        return self._limits.tolist() != known

    def largest(self, given: IntArray, *, at_least: int = 0) -> IntArray:
        """Return the largest sizes, ``(world_size,)``.

        Args:
            given: the largest sizes by what was asked for, ``(world_size,)``.
            at_least: as for ``MemoryModel.caps``.
        """
        modelled = self._memory.caps(self.peaks, given, at_least=at_least)
        caps: IntArray = np.minimum(np.minimum(modelled, given), self._limits)
        return caps


class MemoryCaps(KnownMemory):
    """The caps in force, which tighten and relax with what workers report of their memory.

    The smallest holds of three: the caps that were given, those modelled from the peaks of the
    sizes visited, and those that workers found by trial or by running out.

    Args:
        job: what is planned for.
        memory: how peaks become caps.

    Attributes:
        caps: most samples of one forward on every worker, ``(world_size,)``; None is no cap.
        cluster: what a policy may plan, within the caps.
        overfull: whether the global batch exceeds what is known to fit, so that nothing may grow.

    Raises:
        ValueError: the bounds leave no way to split the global batch.
    """

    def __init__(self, job: Job, memory: MemoryModel) -> None:
        super().__init__(job.world_size, memory, job.global_batch_size)
        self._job = job
        self.caps = job.caps()
        self.cluster = job.cluster(self.caps)
        self.overfull = False

    def restore(self, peaks: Any, former: IntArray) -> None:
        """Hold the sizes to peaks that are known from before, of workers at other ranks perhaps."""
        if not self.take_back(peaks, former):
            return
        caps = self._modelled_caps()
        try:
            self.cluster = self._job.cluster(caps)
        except ValueError:  # of peaks that will not come again, perhaps: measured anew
            self.peaks = self._memory.init(len(caps))
        else:
            self.caps = caps

    def measured(self, reports: Sequence[Report], plan: Plan) -> list[Event]:
        """Take in the peaks of a step; tighten or relax the caps they imply."""
        if not reports_peaks(reports):
            return []
        reported = np.array([report.largest_forward for report in reports])
        sizes = np.array([report.batch_size for report in reports])
        ran = np.where(reported > 0, reported, self._largest(plan, sizes))
        self.take_peaks(reports, ran)
        return self._tighten(reports)

    def limited(self, reports: Sequence[Report]) -> list[Event]:
        """Take in what workers found not to fit."""
        return self._tighten(reports) if self.take_limits(reports) else []

    def is_outgrown_by(self, plan: Plan) -> bool:
        """Return whether ``plan`` exceeds what is known to fit."""
        if self.caps is None:
            return False
        held = np.array(plan.batch_size, dtype=np.int64)
        return bool((self._largest(plan, held) > self.caps).any())

    def _largest(self, plan: Plan, batch_size: IntArray) -> IntArray:
        """Return the largest single forward of every worker under ``plan``."""
        if plan.max_forward is None or not self._job.cuts:
            return batch_size
        forwards = (plan.forwards(r, int(size)) for r, size in enumerate(batch_size))
        return np.array([max(sizes) for sizes in forwards], dtype=np.int64)

    def _modelled_caps(self) -> IntArray:
        """Return the largest sizes, by what was given and by the peaks."""
        given = self._job.caps()
        total = np.full(self._job.world_size, self._job.global_batch_size)
        return self.largest(total if given is None else given)

    def _tighten(self, reports: Sequence[Report]) -> list[Event]:
        """Plan within what is known to fit, or let nothing grow if that is too little for all."""
        caps = self._modelled_caps()
        before = np.full(len(caps), self._job.global_batch_size)
        before = before if self.caps is None else self.caps
        changed = np.flatnonzero(caps != before)
        if not len(changed):
            self.overfull = False  # what fitted before does again
            return []
        try:
            cluster = self._job.cluster(caps)
        except ValueError as error:  # the run has to continue, but nothing may grow
            was_overfull, self.overfull = self.overfull, True
            problem = (
                f"the global batch does not fit in memory ({error}). Loops over `loader.steps()` "
                f"take it in micro-batches"
            )
            return [] if was_overfull else [SizesHeld(reports[0].step, problem)]
        self.caps, self.cluster, self.overfull = caps, cluster, False
        return capped(reports, changed, caps)


def reports_peaks(reports: Sequence[Report]) -> bool:
    """Return whether any rank reads its memory, without arrays: all ranks wait."""
    return any(report.capacity_bytes and report.peak_bytes for report in reports)


def capacity_of(reports: Sequence[Report]) -> IntArray:
    """Return the memory that every rank's device offers, ``(world_size,)``, 0 where unknown."""
    return np.array([report.capacity_bytes for report in reports])


def capped(
    reports: Sequence[Report], ranks: IntArray, caps: IntArray, *, unit: str = "samples"
) -> list[Event]:
    """Return that the caps of some ranks have changed."""
    step, capacity = reports[0].step, capacity_of(reports)
    return [MemoryCapped(step, int(r), int(caps[r]), int(capacity[r]), unit) for r in ranks]


_FALL = 32  # a cap that falls does so by that part of it more, so that it does not soon again
_RISE = 1.25  # times a cap, from which on a larger one takes its place


@final
class SizeCaps(KnownMemory):
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
        super().__init__(world_size, memory, UNSEEN)
        self._costs = costs
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

    def restore(self, peaks: Any, former: IntArray) -> None:
        """Take in peaks of forwards of the same data, of workers at other ranks perhaps."""
        if self.take_back(peaks, former):
            self._caps = self._modelled()

    def observe(self, reports: Sequence[Report]) -> list[Event]:
        """Take in the peaks of a step, and what ranks found not to fit.

        A rank without samples has a stand-in, of whose size nothing is known.
        """
        works = [report.work.own for report in reports if report.work is not None]
        num, size = [sum(own[at] for own in works) for at in (0, 1)]
        self._mean = max(self._mean, -(-size // max(num, 1)))
        is_new = self.take_limits(reports)
        if reports_peaks(reports):
            self.take_peaks(reports, np.array([report.largest_forward for report in reports]))
        elif not is_new:
            return []
        modelled, before = self._modelled(), self._caps
        falls = modelled < before
        lower = np.where(before < self._given, modelled - modelled // _FALL, modelled)
        higher = np.where(modelled >= _RISE * before, modelled, before)
        self._caps = np.where(falls, lower, higher)
        return capped(reports, np.flatnonzero(self._caps != before), self._caps, unit="size")

    def hold(self, counts: IntArray) -> bool:
        """Return whether so many samples of each rank keep to the caps, whichever they are."""
        caps = self.caps
        return caps is None or bool((counts * self._costs.most[1] <= caps).all())

    def _modelled(self) -> IntArray:
        longest = int(self._costs.most[1]) if self._costs.is_known else 0
        return self.largest(self._given, at_least=longest)
