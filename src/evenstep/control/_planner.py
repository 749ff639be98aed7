"""From the reports of a step to the plan of the next: what a driver runs on rank 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .._types import Cluster, Decision, IntArray, StepTimings
from ..events import (
    Event,
    MeasurementRejected,
    MemoryCapped,
    MemoryShort,
    PolicyFailed,
    Rebalanced,
    StepMeasured,
)
from ..policies import AbstractPolicy
from ..timemodels import MemoryModel
from ._bounds import Bounds
from ._plan import Plan
from ._report import Report
from ._tail import split_tail
from ._whatif import WhatIf


@dataclass(frozen=True, slots=True)
class Outcome:
    """What followed from one step.

    Attributes:
        plan: what holds from now on; the very same object if nothing changed.
        events: the facts, in order.
    """

    plan: Plan
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """What a planner plans for.

    Attributes:
        world_size: number of workers.
        global_batch_size: samples of a full step.
        tail_size: samples of the short last step of an epoch; 0 if there is none.
        bounds: limits on every worker's samples.
        smallest: what ``Bounds(min="auto")`` stands for.
        tail_smallest: smallest local batch in the short last step, 0 where none is needed.
        cuts: whether the loop takes micro-batches, so that caps limit one forward and not the
            whole local batch.
    """

    world_size: int
    global_batch_size: int
    tail_size: int = 0
    bounds: Bounds = field(default_factory=Bounds)
    smallest: int = 1
    tail_smallest: int = 0
    cuts: bool = False

    def caps(self) -> IntArray | None:
        """Return the largest sizes that were given, ``(world_size,)``; None if none were."""
        return self.bounds.caps(self.world_size)

    def cluster(self, caps: IntArray | None) -> Cluster:
        """Return what the policy plans for, with nobody above ``caps`` in one forward."""
        return self.bounds.cluster(
            self.world_size,
            self.global_batch_size,
            smallest=self.smallest,
            caps=None if self.cuts else caps,
        )


class Planner:
    """Runs a policy over the steps of a training run, and stands between it and its mistakes.

    - The first step of a run warms up (allocators, kernels, buckets) and is not shown to the
      policy, nor is the short last step of an epoch, which has a batch of its own.
    - A report that cannot be (NaN, zero, negative, infinite) is named in an event and its step
      left out; it never spreads into a plan.
    - A policy that raises, or whose sizes break the bounds, is named in an event, and the last
      good plan stays in force.
    - Memory: caps that were given, and those modelled from the peaks of the sizes visited,
      whichever is smaller, bound what the policy may plan.

    It reads no clock and talks to nobody: reports in, a plan and events out.

    Args:
        policy: decides the sizes.
        job: what is planned for.
        memory: how peaks become caps; the default suits most models.

    Raises:
        ValueError: the bounds leave no way to split the global batch.
    """

    def __init__(
        self, policy: AbstractPolicy[Any], job: Job, memory: MemoryModel | None = None
    ) -> None:
        self._policy = policy
        self._job = job
        self._memory = memory or MemoryModel()
        self._peaks = self._memory.init(job.world_size)
        self._caps = job.caps()
        self._cluster = job.cluster(self._caps)
        self._what_if = WhatIf(job.world_size)
        self._num_measured = 0
        self._overfull = False  # whether the global batch exceeds what is known to fit
        decision = policy.init(self._cluster)
        self._check(decision)
        self._state = decision.state
        self.plan = self._make_plan(0, 0, decision)

    def observe(self, reports: Sequence[Report], *, next_step: int) -> Outcome:
        """Return what follows from one step: everybody is waiting for it.

        Args:
            reports: one from each rank, in order, all about the same step.
            next_step: the first step that can still use a new plan.
        """
        step = reports[0].step
        bad = [(rank, report.problem()) for rank, report in enumerate(reports)]
        rejected = tuple(
            MeasurementRejected(step, rank, problem) for rank, problem in bad if problem
        )
        if rejected:
            return Outcome(self.plan, rejected)
        timings = _timings(reports)
        self._num_measured += 1
        events = self._learn_memory(reports, timings)
        counts = self._num_measured > 1 or self._outgrown()
        if self._is_full(timings) and counts and not self._overfull:
            events += self._decide(step, next_step, timings)
        return Outcome(self.plan, tuple(events))

    def account(self, reports: Sequence[Report], plan: Plan) -> StepMeasured | None:
        """Return what a step cost, and would have cost otherwise; nobody waits for that.

        Args:
            reports: one from each rank, in order, all about the same step.
            plan: the one it ran under.

        Returns:
            The fact, or None if a report cannot be.
        """
        if any(report.problem() for report in reports):
            return None
        timings = _timings(reports)
        if self._num_measured > 1:  # the first step warms up
            self._what_if.observe(timings)
        compute_s = np.where(timings.batch_size > 0, timings.compute_s, 0.0)
        makespan_s = float(compute_s.max())
        idle_s = makespan_s - compute_s
        costs = self._what_if.costs(self._cluster, timings) if self._is_full(timings) else None
        return StepMeasured(
            step=reports[0].step,
            plan_epoch=plan.epoch,
            batch_size=tuple(timings.batch_size.tolist()),
            compute_s=tuple(compute_s.tolist()),
            data_s=tuple(timings.data_s.tolist()),
            idle_s=tuple(idle_s.tolist()),
            makespan_s=makespan_s,
            idle_share=float(idle_s.sum() / (len(reports) * makespan_s)),
            equal_split_s=costs.equal_s if costs else None,
            best_split_s=costs.best_s if costs else None,
            wall_s=reports[0].wall_s,
        )

    def _decide(self, step: int, next_step: int, timings: StepTimings) -> list[Event]:
        """Ask the policy; keep the last good plan if it fails."""
        try:
            decision = self._policy.update(self._cluster, timings, self._state)
            self._check(decision)
        except Exception as error:  # the policy may be anybody's: training goes on
            return [PolicyFailed(step, f"{type(error).__name__}: {error}")]
        self._state = decision.state
        plan = self._make_plan(self.plan.epoch + 1, next_step, decision)
        if (plan.batch_size, plan.max_forward) == (self.plan.batch_size, self.plan.max_forward):
            return []
        self.plan = plan
        return [Rebalanced(plan.first_step, plan.epoch, plan.batch_size, plan.reason)]

    def _is_full(self, timings: StepTimings) -> bool:
        return int(timings.batch_size.sum()) == self._job.global_batch_size

    def _learn_memory(self, reports: Sequence[Report], timings: StepTimings) -> list[Event]:
        """Take in the peaks of a step; tighten or relax the caps they imply."""
        if not any(report.capacity_bytes and report.peak_bytes for report in reports):
            return []
        capacity = np.array([report.capacity_bytes for report in reports])
        peaks = np.array([report.peak_bytes for report in reports])
        ran = timings.batch_size
        if self.plan.max_forward is not None:  # a peak belongs to the largest forward
            ran = np.minimum(ran, self.plan.max_forward)
        self._peaks = self._memory.update(self._peaks, ran, peaks, capacity)
        total = np.full(len(reports), self._job.global_batch_size)
        given = self._job.caps()
        limit = total if given is None else given
        caps = np.minimum(self._memory.caps(self._peaks, limit), limit)
        before = total if self._caps is None else self._caps
        changed = np.flatnonzero(caps != before)
        if not len(changed):
            return []
        step = reports[0].step
        try:
            cluster = self._job.cluster(caps)
        except ValueError as error:  # what runs has to go on running, but nothing may grow
            told, self._overfull = self._overfull, True
            return [] if told else [MemoryShort(step, str(error))]
        self._caps, self._cluster, self._overfull = caps, cluster, False
        return [MemoryCapped(step, int(r), int(caps[r]), int(capacity[r])) for r in changed]

    def _outgrown(self) -> bool:
        """Tell whether the plan in force exceeds what is known to fit."""
        return self._caps is not None and bool((self._largest() > self._caps).any())

    def _largest(self) -> IntArray:
        held: IntArray = np.array(self.plan.batch_size, dtype=np.int64)
        if self.plan.max_forward is None:
            return held
        limit: IntArray = np.array(self.plan.max_forward, dtype=np.int64)
        return np.minimum(held, limit)

    def _make_plan(self, epoch: int, first_step: int, decision: Decision[Any]) -> Plan:
        caps = self._caps
        tail = None
        if self._job.tail_size:
            limit = None if self._job.cuts else caps
            tail = split_tail(
                decision.batch_size, self._job.tail_size, limit, smallest=self._job.tail_smallest
            )
        return Plan(
            epoch=epoch,
            first_step=first_step,
            batch_size=tuple(decision.batch_size.tolist()),
            tail=None if tail is None else tuple(tail.tolist()),
            max_forward=tuple(caps.tolist()) if self._job.cuts and caps is not None else None,
            reason=decision.reason,
        )

    def _check(self, decision: Decision[Any]) -> None:
        """Raise unless the sizes can be run as they are."""
        sizes, cluster = decision.batch_size, self._cluster
        name = type(self._policy).__name__
        if not np.issubdtype(sizes.dtype, np.integer) or sizes.shape != (cluster.world_size,):
            raise ValueError(f"{name} gave {sizes!r}, not {cluster.world_size} integers")
        if sizes.sum() != cluster.global_batch_size:
            raise ValueError(
                f"{name} gave {sizes.tolist()}, which add up to {sizes.sum()} and not to the "
                f"global batch of {cluster.global_batch_size}"
            )
        outside = (sizes < cluster.min_batch_size) | (sizes > cluster.max_batch_size)
        if outside.any():
            rank = int(np.argmax(outside))
            raise ValueError(
                f"{name} gave rank {rank} {sizes[rank]} samples, outside "
                f"{cluster.min_batch_size[rank]} to {cluster.max_batch_size[rank]}"
            )


def _timings(reports: Sequence[Report]) -> StepTimings:
    return StepTimings(
        np.array([report.batch_size for report in reports]),
        np.array([report.compute_s for report in reports], dtype=np.float64),
        data_s=np.array([report.data_s for report in reports], dtype=np.float64),
    )
