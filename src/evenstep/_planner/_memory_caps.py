"""What fits on every worker: as given, as modelled by peaks, as found by trial."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .._types import IntArray
from ..events import Event, MemoryCapped, SizesHeld
from ..timemodels._memory_model import MemoryModel
from ._job import Job
from ._learnt import rows
from ._plan import Plan
from ._report import Report


class MemoryCaps:
    """The caps in force, which tighten and relax with what workers tell of their memory.

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
        self._job = job
        self._memory = memory
        self._peaks = memory.init(job.world_size)
        self._limits = np.full(job.world_size, job.global_batch_size)  # found by the workers
        self.caps = job.caps()
        self.cluster = job.cluster(self.caps)
        self.overfull = False

    @property
    def peaks(self) -> Any:
        """What the steps so far have taught about memory, for ``restore``."""
        return self._peaks

    def restore(self, peaks: Any, former: IntArray) -> None:
        """Hold the sizes to peaks that are known from before, of workers at other ranks perhaps."""
        self._peaks = rows(peaks, self._memory.init(self._job.world_size), former)
        if not (self._peaks[0] > 0).any():
            return
        caps = self._modelled_caps()
        try:
            self.cluster = self._job.cluster(caps)
        except ValueError:  # of peaks that will not come again, perhaps: measured anew
            self._peaks = self._memory.init(self._job.world_size)
        else:
            self.caps = caps

    def measured(self, reports: Sequence[Report], plan: Plan) -> list[Event]:
        """Take in the peaks of a step; tighten or relax the caps they imply."""
        if not any(report.capacity_bytes and report.peak_bytes for report in reports):
            return []
        capacity = np.array([report.capacity_bytes for report in reports])
        peaks = np.array([report.peak_bytes for report in reports])
        told = np.array([report.largest_forward for report in reports])
        sizes = np.array([report.batch_size for report in reports])
        ran = np.where(told > 0, told, _largest(plan, sizes))  # whose the peak was
        self._peaks = self._memory.update(self._peaks, ran, peaks, capacity)
        return self._tighten(reports[0].step, capacity)

    def limited(self, reports: Sequence[Report]) -> list[Event]:
        """Take in what workers found not to fit."""
        if not any(report.limit for report in reports):
            return []
        found = [r.limit or limit for r, limit in zip(reports, self._limits.tolist(), strict=True)]
        if found == self._limits.tolist():
            return []
        self._limits = np.minimum(self._limits, found)
        return self._tighten(reports[0].step, np.array([r.capacity_bytes for r in reports]))

    def is_outgrown_by(self, plan: Plan) -> bool:
        """Tell whether ``plan`` exceeds what is known to fit."""
        if self.caps is None:
            return False
        held = np.array(plan.batch_size, dtype=np.int64)
        return bool((_largest(plan, held) > self.caps).any())

    def _modelled_caps(self) -> IntArray:
        """Return the largest sizes, by what was given and by the peaks."""
        given = self._job.caps()
        total = np.full(self._job.world_size, self._job.global_batch_size)
        limit = total if given is None else given
        caps: IntArray = np.minimum(self._memory.caps(self._peaks, limit), limit)
        held: IntArray = np.minimum(caps, self._limits)
        return held

    def _tighten(self, step: int, capacity: IntArray) -> list[Event]:
        """Plan within what is known to fit, or let nothing grow if that is too little for all."""
        caps = self._modelled_caps()
        before = np.full(len(caps), self._job.global_batch_size)
        before = before if self.caps is None else self.caps
        changed = np.flatnonzero(caps != before)
        if not len(changed):
            return []
        try:
            cluster = self._job.cluster(caps)
        except ValueError as error:  # what runs has to go on running, but nothing may grow
            told, self.overfull = self.overfull, True
            problem = (
                f"the global batch does not fit in memory ({error}). Loops over `loader.steps()` "
                f"take it in micro-batches"
            )
            return [] if told else [SizesHeld(step, problem)]
        self.caps, self.cluster, self.overfull = caps, cluster, False
        return [MemoryCapped(step, int(r), int(caps[r]), int(capacity[r])) for r in changed]


def _largest(plan: Plan, batch_size: IntArray) -> IntArray:
    """Return the largest single forward of every worker under ``plan``."""
    if plan.max_forward is None:
        return batch_size
    forwards = (plan.forwards(r, int(size)) for r, size in enumerate(batch_size))
    return np.array([max(sizes) for sizes in forwards], dtype=np.int64)
