"""From the reports of a step to the plan of the next: what a driver runs on rank 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._types import Decision, IntArray, StepTimings
from ..events import (
    EstimatesRestored,
    Event,
    MeasurementRejected,
    MemoryCapped,
    MemoryShort,
    PolicyFailed,
    Rebalanced,
    SizesHeld,
    StepMeasured,
)
from ..policies import AbstractPolicy
from ..timemodels import MemoryModel
from ._job import Job
from ._learnt import Learnt, Start, columns, rows
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
        warm_up_steps: steps at the start that the policy is not shown; none in a simulation.

    Raises:
        ValueError: the bounds leave no way to split the global batch.
    """

    def __init__(
        self,
        policy: AbstractPolicy[Any],
        job: Job,
        memory: MemoryModel | None = None,
        *,
        warm_up_steps: int = 1,
    ) -> None:
        self._policy = policy
        self._job = job
        self._memory = memory or MemoryModel()
        self._peaks = self._memory.init(job.world_size)
        self._limits = np.full(job.world_size, job.global_batch_size)  # found by the workers
        self._caps = job.caps()
        self._cluster = job.cluster(self._caps)
        self._what_if = WhatIf(job.world_size)
        self._warm_up_steps = warm_up_steps
        self._num_measured = 0
        self._held = False  # because a worker asked for it
        self._overfull = False  # whether the global batch exceeds what is known to fit
        decision = policy.init(self._cluster)
        self._check(decision)
        self._state = decision.state
        self.plan = self._make_plan(0, 0, decision)

    def observe(self, reports: Sequence[Report], *, next_step: int, ask: bool = True) -> Outcome:
        """Return what follows from one step: everybody is waiting for it.

        Args:
            reports: one from each rank, in order, all about the same step.
            next_step: the first step that can still use a new plan.
            ask: whether to ask the policy; if not, the plan stays.
        """
        step = reports[0].step
        bad = [(rank, report.problem()) for rank, report in enumerate(reports)]
        rejected = tuple(
            MeasurementRejected(step, rank, problem) for rank, problem in bad if problem
        )
        limited = self._learn_limits(reports)
        if rejected:
            return Outcome(self.plan, (*limited, *rejected))
        timings = _timings(reports)
        self._num_measured += 1
        events = limited + self._learn_memory(reports, timings) + self._hold(reports)
        counts = self._num_measured > self._warm_up_steps or self._outgrown()
        free = not self._held or self._outgrown()  # what does not fit has to change
        if ask and free and self._is_full(timings) and counts and not self._overfull:
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
        if self._num_measured > self._warm_up_steps:
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

    def learnt(self) -> Learnt:
        """Return what the steps so far have taught: arrays and plain values, not to be changed."""
        return {
            "policy": repr(self._policy),
            "policy_state": self._state,
            "global_batch_size": self._job.global_batch_size,
            "batch_size": np.array(self.plan.batch_size, np.int64),
            "times": self._what_if.state,
            "memory": self._peaks,
        }

    def restore(self, learnt: Learnt, former: IntArray) -> EstimatesRestored:
        """Go on from what an earlier run has learnt, as far as the workers are the same.

        - The same workers at the same ranks, under the same policy and global batch: the policy
          goes on from its very state, and the plan is the one that was in force.
        - Otherwise, with a time known of every worker: the policy starts anew and is shown steps
          of these times first, since only it knows what its state says about whom.
        - With a worker that nobody has measured, it starts anew.

        Peaks of memory stay with their workers if there are as many as before, as models that are
        sharded take more on fewer. Before the first step.

        Args:
            learnt: from ``learnt`` of a planner.
            former: the rank each worker had then, -1 for one that is new, ``(world_size,)``.
        """
        num_before, world_size = len(learnt["batch_size"]), self._job.world_size
        times = columns(learnt["times"], self._what_if.fresh(world_size), former)
        self._what_if.restore(times)
        if num_before == world_size:
            self._peaks = rows(learnt["memory"], self._memory.init(world_size), former)
            self._fit_memory()
        same = num_before == world_size and bool((former == np.arange(world_size)).all())
        known, start = self._what_if.known(), Start(self._policy, self._cluster, self._check)
        asked = learnt["policy"], learnt["global_batch_size"]
        same &= asked == (repr(self._policy), self._job.global_batch_size)
        how, decision = start.resumed(learnt, known) if same else start.rehearsed(known)
        self._state = decision.state
        self.plan = self._make_plan(0, 0, decision)
        return EstimatesRestored(tuple((former >= 0).tolist()), how, self.plan.batch_size)

    def _fit_memory(self) -> None:
        """Hold the sizes to the peaks that are known from before."""
        if not (self._peaks[0] > 0).any():
            return
        caps = self._modelled_caps()
        try:
            self._cluster = self._job.cluster(caps)
        except ValueError:  # of peaks that will not come again, perhaps: measured anew
            self._peaks = self._memory.init(self._job.world_size)
        else:
            self._caps = caps

    def _modelled_caps(self) -> IntArray:
        """Return the largest sizes, by what was given and by the peaks."""
        given = self._job.caps()
        total = np.full(self._job.world_size, self._job.global_batch_size)
        limit = total if given is None else given
        caps: IntArray = np.minimum(self._memory.caps(self._peaks, limit), limit)
        held: IntArray = np.minimum(caps, self._limits)
        return held

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

    def _hold(self, reports: Sequence[Report]) -> list[Event]:
        """Keep the sizes from the first report on that asks for it."""
        asking = [rank for rank, report in enumerate(reports) if report.holds]
        if self._held or not asking:
            return []
        self._held = True
        return [SizesHeld(reports[0].step, asking[0], self.plan.batch_size)]

    def _is_full(self, timings: StepTimings) -> bool:
        return int(timings.batch_size.sum()) == self._job.global_batch_size

    def _learn_memory(self, reports: Sequence[Report], timings: StepTimings) -> list[Event]:
        """Take in the peaks of a step; tighten or relax the caps they imply."""
        if not any(report.capacity_bytes and report.peak_bytes for report in reports):
            return []
        capacity = np.array([report.capacity_bytes for report in reports])
        peaks = np.array([report.peak_bytes for report in reports])
        told = np.array([report.largest_forward for report in reports])
        ran = np.where(told > 0, told, self._largest(timings.batch_size))  # whose the peak was
        self._peaks = self._memory.update(self._peaks, ran, peaks, capacity)
        return self._tighten(reports[0].step, capacity)

    def _learn_limits(self, reports: Sequence[Report]) -> list[Event]:
        """Take in what workers found not to fit."""
        if not any(report.limit for report in reports):
            return []
        found = [r.limit or limit for r, limit in zip(reports, self._limits.tolist(), strict=True)]
        if found == self._limits.tolist():
            return []
        self._limits = np.minimum(self._limits, found)
        return self._tighten(reports[0].step, np.array([r.capacity_bytes for r in reports]))

    def _tighten(self, step: int, capacity: IntArray) -> list[Event]:
        """Plan within what is known to fit, or let nothing grow if that is too little for all."""
        caps = self._modelled_caps()
        before = np.full(len(caps), self._job.global_batch_size)
        before = before if self._caps is None else self._caps
        changed = np.flatnonzero(caps != before)
        if not len(changed):
            return []
        try:
            cluster = self._job.cluster(caps)
        except ValueError as error:  # what runs has to go on running, but nothing may grow
            told, self._overfull = self._overfull, True
            return [] if told else [MemoryShort(step, str(error))]
        self._caps, self._cluster, self._overfull = caps, cluster, False
        return [MemoryCapped(step, int(r), int(caps[r]), int(capacity[r])) for r in changed]

    def _outgrown(self) -> bool:
        """Tell whether the plan in force exceeds what is known to fit."""
        held = np.array(self.plan.batch_size, dtype=np.int64)
        return self._caps is not None and bool((self._largest(held) > self._caps).any())

    def _largest(self, batch_size: IntArray) -> IntArray:
        """Return the largest single forward of every worker under the plan in force."""
        forwards = (self.plan.forwards(r, int(size)) for r, size in enumerate(batch_size))
        return np.array([max(sizes) for sizes in forwards], dtype=np.int64)

    def _make_plan(self, epoch: int, first_step: int, decision: Decision[Any]) -> Plan:
        caps = self._caps
        tail = None
        if self._job.tail_size:
            limit = None if self._job.cuts else caps
            tail = split_tail(
                decision.batch_size,
                self._job.tail_size,
                limit,
                smallest=self._job.tail_smallest,
                granularity=self._job.tail_granularity,
            )
        max_forward = self._job.max_forward(decision.batch_size, caps)
        return Plan(
            epoch=epoch,
            first_step=first_step,
            batch_size=tuple(decision.batch_size.tolist()),
            tail=None if tail is None else tuple(tail.tolist()),
            max_forward=None if max_forward is None else tuple(max_forward.tolist()),
            granularity=tuple(self._cluster.granularity.tolist()) if self._job.cuts else None,
            reason=str(decision.reason),  # anybody's policy: it has to survive the way
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
