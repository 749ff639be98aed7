"""From the reports of a step to the plan of the next: what a driver runs on rank 0."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

import numpy as np

from .._types import Cluster, Decision, FloatArray, IntArray, StepTimings
from ..events import (
    ClaimsSwitched,
    EstimatesRestored,
    Event,
    PolicyFailed,
    WorkerUnhelpful,
)
from ..policies import AbstractPolicy, Equal
from ..policies._base import check_decision
from ..timemodels._memory_model import MemoryModel
from ._base import AbstractPlanner, ClaimSwitch, UserMistake, blaming, held, in_words, rejected
from ._job import Job
from ._learnt import BY_COST, Known, Learnt, columns, foreseen, rehearse
from ._memory_caps import MemoryCaps
from ._plan import Plan, Reading, Readings, Report, apart, lasted_s, split_tail, timings_of
from ._whatif import WhatIf

_WEIGHT = 0.1  # of the newest step, in what a sample usually takes


def as_planned(
    reports: Sequence[Report], sizes: Sequence[int], usual: FloatArray | None
) -> tuple[Sequence[Report], FloatArray | None]:
    r"""Return the reports of a step at the planned ``sizes``, and what samples usually take now.

    For steps that differ in their samples. No reports at all where the step says too little.

    Where rank $r$ took $t_r$ for $n_r$ samples, and $b_r$ are planned, the policy is shown $b_r$
    samples in $b_r t_r / (n_r h)$ seconds. $h$ is how heavy the samples of this step were: the
    median over ranks of $t_r / n_r$ over what that usually is, by a moving geometric mean. A plan
    is applied to every step in proportion, so only how ranks compare within one is of use: a batch
    of a thousand short samples and one of ten long ones say the same of two ranks.

    Right where a step takes about as long as its samples: fixed costs are seen as a part of what
    samples cost. In small steps that is most of it, so those of less than a quarter of the planned
    samples are left out; and those in which a rank has none.

    Args:
        reports: one from each rank, in order, that can be planned by.
        sizes: as planned for the step, ``(world_size,)``.
        usual: the logarithm of the seconds that a sample usually takes, ``(world_size,)``; None
            before the first such step.
    """
    counts = np.array([report.batch_size for report in reports])
    planned = np.array(sizes)
    ran = planned > 0
    if ((counts > 0) != ran).any() or 4 * counts.sum() < planned.sum():
        return (), usual
    took_s = np.array([report.compute_s for report in reports])
    each = np.log(np.where(ran, took_s / np.maximum(counts, 1), np.nan))
    usual = each if usual is None else np.where(np.isnan(usual), each, usual)
    heavy = float(np.nanmedian(each - usual))
    as_planned_s = planned * np.exp(each - heavy)
    total = int(planned.sum())
    shown = [
        report._replace(
            batch_size=size, global_num_samples=total, compute_s=float(seconds) if size else 0.0
        )
        for report, size, seconds in zip(reports, sizes, as_planned_s, strict=True)
    ]
    return shown, np.where(ran, usual + _WEIGHT * (each - usual), usual)


@final
class Planner(AbstractPlanner):
    """Runs a policy over the steps of a training run, and stands between it and its mistakes.

    - The first step of a run warms up (allocators, kernels, buckets): the policy may guess sizes
      by it, but does not learn from it. The short last step of an epoch, which has a batch of its
      own, is not shown to it. Where any step may have a size of its own, it is shown as if it had
      the planned one (``as_planned``).
    - A report that cannot be (NaN, zero, negative, infinite) is named in an event and its step
      left out; it never spreads into a plan.
    - A user's policy that raises, or whose sizes break the bounds, is named in an event, and the
      last good plan stays in force. What fails in evenstep itself, its own policies included,
      raises: the driver continues with ``EqualSizes``.
    - Steps of a few milliseconds say little, and deciding takes as long: they are shown to the
      policy together, as many seconds of them as it asks for, by every worker's median.
    - Memory: caps that were given, and those modelled from the peaks of the sizes visited,
      whichever is smaller, bound what the policy may plan.
    - A policy may promise to keep the sizes after a step that all workers end level
      (``Decision.level``): it is shown such a step when no rank waits (``catch_up``), and the
      sizes stay unless it breaks its word. What a step reports of memory is taken in at once, and
      one that moves a cap is shown at once.

    It reads no clock and sends no messages: reports in, a plan and events out.

    Args:
        policy: decides the sizes.
        job: what is planned for.
        memory: how peaks become caps; the default suits most models.
        warm_up_steps: steps at the start that the policy does not learn from; none in a simulation.
        claims: says when samples of a step are up for claims; None is never.

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
        claims: ClaimSwitch | None = None,
    ) -> None:
        self._policy = policy
        self._job = job
        self._caps = MemoryCaps(job, memory or MemoryModel())
        self._what_if = WhatIf(job.world_size)
        self._warm_up_steps = warm_up_steps
        self.claims = claims
        self._num_measured = 0
        self._readings = Readings[Callable[[], StepTimings]](policy.reading_s)
        self._held = False  # because a worker asked for it
        self._is_uneven = False  # from the first such step on
        self._usual: FloatArray | None = None  # for `as_planned`
        self._shown: dict[int, Sequence[Report]] = {}  # as the policy saw them, until accounted for
        decision = policy.init(self._caps.cluster)
        self._check(decision)
        self._adopt(decision)
        self.plan = self._make_plan(0, 0, decision)
        self._has_claims = self.plan.first is not None  # as the newest event says

    def observe(
        self, reports: Sequence[Report], *, next_step: int, ask: bool = True
    ) -> tuple[Event, ...]:
        caught_up = self.catch_up(next_step=next_step, ask=ask)
        step = reports[0].step
        bad = rejected(reports)
        capped = self._caps.limited(reports)
        if bad:
            events = [*caught_up, *bad, *capped]
        else:
            capped += self._caps.measured(reports, self.plan)
            asked = [] if self._held else held(reports)
            self._held |= bool(asked)  # sizes stay from the first report on that asks for it
            events = [*caught_up, *capped, *asked]
            reports = self._as_planned(reports) if self._job.varies else reports
            reading = self._read(reports, at_once=bool(capped)) if reports else None
            if reading is not None:
                apart_by, at_once = partial(apart, reports), not ask or bool(capped)
                events += self._show(step, reading, apart_by, next_step, ask=ask, at_once=at_once)
            elif reports and self._num_measured == self._warm_up_steps:
                first = Reading((partial(timings_of, reports),))
                if self._is_full(first.timings):
                    guess = self._guess
                    events += self._decide(step, first, next_step=next_step, ask=ask, by=guess)
        events += self._follow_switch(step, next_step)
        return tuple(events)

    def observe_timings(
        self, step: int, timings: StepTimings, *, next_step: int
    ) -> tuple[Event, ...]:
        """Return the same for a full step whose times come as arrays, with no word on memory.

        For a simulation of thousands of workers, where a report each would take longer than the
        policy.

        Args:
            step: the step that was measured.
            timings: of all workers.
            next_step: the first step that can still use a new plan.
        """
        events = list(self.catch_up(next_step=next_step))
        ran = timings.batch_size > 0
        key, took_s = timings.batch_size.tobytes(), float(timings.compute_s[ran].max())
        reading = self._add(self._is_full(timings), key, took_s, lambda: timings)
        if reading is not None:
            events += self._show(step, reading, lambda: timings.apart, next_step)
        return tuple(events)

    @property
    def hold(self) -> int:
        return 1 if self.claims is not None else self._readings.num_left

    def _otherwise(
        self, reports: Sequence[Report], plan: Plan, timings: StepTimings
    ) -> Mapping[str, float]:
        seen = timings
        if self._is_uneven:
            if not (shown := self._shown.pop(reports[0].step, ())):
                return {}
            seen = timings_of(shown)
        warm, is_full = self._num_measured > self._warm_up_steps, self._is_full(seen)
        claimed = plan.first is not None
        if warm:
            self._what_if.observe(seen, is_tail=not is_full, claimed=claimed)
        if is_full and warm and self.claims is not None:
            self.claims.observe(seen, claimed=claimed)
        costs = self._what_if.costs(self._caps.cluster, seen) if is_full else None
        if costs is None:
            return {}
        share = 1.0
        if seen is not timings:
            share = float(timings.compute_s.max() / seen.compute_s.max())
        return {"equal_split_s": costs[0] * share, "best_split_s": costs[1] * share}

    def equal_plan(self, first_step: int, reason: str) -> Plan:
        equal = replace(Equal().init(self._caps.cluster), reason=reason)
        return replace(self._make_plan(self.plan.epoch + 1, first_step, equal), first=None)

    def burden(self, step: int) -> WorkerUnhelpful | None:
        return self._what_if.burden(step, self._caps.cluster)

    def learnt(self) -> Learnt:
        return {
            "policy": repr(self._policy),
            "policy_state": self._state,
            "global_batch_size": self._job.global_batch_size,
            "batch_size": np.array(self.plan.batch_size, np.int64),
            "times": self._what_if.state,
            "memory": self._caps.peaks,
        }

    def restore(self, learnt: Learnt, former: IntArray) -> EstimatesRestored:
        """Continue from what an earlier run has learnt, as far as the workers are the same.

        - The same workers at the same ranks, under the same policy and global batch: the policy
          continues from its very state, and the plan is the one that was in force.
        - Otherwise, with a time known of every worker: the policy starts anew and is shown steps
          of these times first, since only it knows what its state says about which worker.
        - With a worker that was never measured, it starts anew.

        Peaks of memory stay with their workers if there are as many as before, as models that are
        sharded take more on fewer. Before the first step.

        Args:
            learnt: from ``learnt`` of a planner.
            former: the rank each worker had then, -1 for one that is new, ``(world_size,)``.
        """
        num_before, world_size = len(learnt["batch_size"]), self._job.world_size
        times = columns(learnt["times"], self._what_if.state, former)
        self._what_if.restore(times)
        if num_before == world_size and learnt["policy"] != BY_COST:  # whose peaks are of tokens
            self._caps.restore(learnt["memory"], former)
        same = num_before == world_size and bool((former == np.arange(world_size)).all())
        known = self._what_if.known()
        asked = learnt["policy"], learnt["global_batch_size"]
        same &= asked == (repr(self._policy), self._job.global_batch_size)
        how, decision, error = self._resumed(learnt, known) if same else self._rehearsed(known)
        problem = "" if error is None else in_words(error)
        self._adopt(decision)
        self.plan = self._make_plan(0, 0, decision)
        return EstimatesRestored(tuple((former >= 0).tolist()), how, self.plan.batch_size, problem)

    def _resumed(
        self, learnt: Learnt, known: Known | None
    ) -> tuple[str, Decision[Any], Exception | None]:
        """Return how it begins, its first decision, and what was raised on the way, if anything.

        Whatever goes wrong with what is known ends in the next simpler way: ``"resumed"`` with the
        decision that was in force, ``"rehearsed"``, ``"anew"``.
        """
        decision = Decision(learnt["batch_size"], learnt["policy_state"], "as before the restart")
        try:
            self._check(decision)
            if known is not None:  # a state it cannot use would stop it for good
                step = foreseen(known, decision.batch_size)
                self._check(self._policy.update(self._caps.cluster, step, decision.state))
        except Exception as error:  # bounds may be others now, and the state of any policy
            how, decision, problem = self._rehearsed(known)
            return how, decision, problem or error
        return "resumed", decision, None

    def _rehearsed(self, known: Known | None) -> tuple[str, Decision[Any], Exception | None]:
        """Return the same for a policy that was not in force on these workers."""
        problem: Exception | None = None
        try:
            if known is not None:
                decision = rehearse(self._policy, self._caps.cluster, known)
                self._check(decision)
                return "rehearsed", decision, None
        except Exception as error:  # a user's policy, and steps that never were
            problem = error
        return "anew", self._policy.init(self._caps.cluster), problem

    def _as_planned(self, reports: Sequence[Report]) -> Sequence[Report]:
        """Return what the policy is shown of a step; nothing if that step teaches it nothing."""
        step, num_samples = reports[0].step, reports[0].global_num_samples
        if not self._is_uneven and num_samples == self._job.global_batch_size:
            return reports
        self._is_uneven = True
        if step < self.plan.first_step:  # it ran under the plan before, perhaps
            return ()
        shown, usual = as_planned(reports, self.plan.batch_size, self._usual)
        if self._num_measured >= self._warm_up_steps:  # else it says nothing of usual times
            self._usual = usual
        self._shown[step] = shown
        return shown

    def _read(self, reports: Sequence[Report], *, at_once: bool) -> Reading | None:
        """Take in a step; return the reading that it completes, if it does.

        Plain numbers, and no arrays: all ranks wait, and right after an idle moment the first
        operation on an array takes a tenth of a millisecond.
        """
        sizes: tuple[int, ...] | None = None  # claims change them in each step
        if self.plan.first is None:
            sizes = tuple(report.batch_size for report in reports)
        took_s = max(report.compute_s for report in reports if report.batch_size)
        is_full = reports[0].global_num_samples == self._job.global_batch_size
        timings = partial(timings_of, reports)
        wall_s = lasted_s(reports)
        return self._add(is_full, sizes, took_s, timings, wall_s=wall_s, at_once=at_once)

    def _add(
        self,
        is_full: bool,
        sizes: Hashable,
        took_s: float,
        timings: Callable[[], StepTimings],
        *,
        wall_s: float = 0.0,
        at_once: bool = False,
    ) -> Reading | None:
        """Take in a step if it counts. Where sizes change, the newest one stands for all."""
        self._num_measured += 1
        outgrown = self._caps.is_outgrown_by(self.plan)
        if not is_full or not (self._num_measured > self._warm_up_steps or outgrown):
            return None
        at_once = at_once or outgrown
        steps = self._readings.add(sizes, took_s, timings, wall_s=wall_s, at_once=at_once)
        return Reading(steps if sizes is not None else steps[-1:]) if steps else None

    def _show(
        self,
        step: int,
        reading: Reading,
        apart_by: Callable[[], float],
        next_step: int,
        *,
        ask: bool = True,
        at_once: bool = False,
    ) -> list[Event]:
        """Show the policy a reading: while all ranks wait, or in a moment where that is level.

        Args:
            step: the step that was measured.
            reading: what the policy is shown.
            apart_by: how far apart the workers ended in the newest step.
            next_step: the first step that can still use a new plan.
            ask: whether the policy may be asked.
            at_once: whether it is shown while all wait in any case.
        """
        if not at_once and self._level > 0:
            apart_now = apart_by() if reading.num_steps == 1 else reading.timings.apart
            if apart_now <= self._level:
                self._put_off = partial(self._decide, step, reading)
                return []
        return self._decide(step, reading, next_step=next_step, ask=ask)

    def _adopt(self, decision: Decision[Any]) -> None:
        self._state, self._level = decision.state, decision.level

    def _decide(
        self,
        step: int,
        reading: Reading,
        *,
        next_step: int,
        ask: bool,
        by: Callable[..., Decision[Any]] | None = None,
    ) -> list[Event]:
        """Ask the policy, unless the sizes have to stay; keep the last good plan if a user's fails.

        Args:
            step: the step that was measured.
            reading: what the policy is shown.
            next_step: the first step that can still use a new plan.
            ask: whether the policy may be asked.
            by: decides; None is the policy's ``update``.
        """
        free = not self._held or self._caps.is_outgrown_by(self.plan)  # what does not fit changes
        if not (ask and free) or self._caps.overfull:
            return []
        decide = by or self._policy.update
        try:
            with blaming(self._policy):
                decision = decide(self._caps.cluster, reading.timings, self._state)
                self._check(decision)
                decision = replace(decision, reason=str(decision.reason))  # it has to travel
        except UserMistake as mistake:  # training continues
            return [PolicyFailed(step, str(mistake), mistake.part)]
        plan = self._make_plan(self.plan.epoch + 1, next_step, decision)
        self._adopt(decision)
        if (plan.batch_size, plan.max_forward) == (self.plan.batch_size, self.plan.max_forward):
            return []
        return self._follow(plan)

    def _guess(self, cluster: Cluster, timings: StepTimings, state: Any) -> Decision[Any]:
        """Return what the policy guesses, or else that all stays as it is."""
        guess = self._policy.guess(cluster, timings, state)
        if guess is not None:
            return guess
        return Decision(np.array(self.plan.batch_size), state, self.plan.reason, self._level)

    def _follow_switch(self, step: int, next_step: int) -> list[Event]:
        """Put the samples of the steps to come up for claims, or no longer."""
        if self.claims is None:
            return []
        plan = self.claims.marked(self.plan)
        if plan.first != self.plan.first:  # or new sizes have brought it along
            self.plan = replace(plan, epoch=plan.epoch + 1, first_step=next_step)
        before, self._has_claims = self._has_claims, plan.first is not None
        return [] if before == self._has_claims else [ClaimsSwitched(step, self._has_claims)]

    def _is_full(self, timings: StepTimings) -> bool:
        return int(timings.batch_size.sum()) == self._job.global_batch_size

    def _make_plan(self, epoch: int, first_step: int, decision: Decision[Any]) -> Plan:
        """Return the plan of the sizes that were decided on."""
        job, caps, tail = self._job, self._caps.caps, None
        if job.tail_size:
            tail = split_tail(
                decision.batch_size,
                job.tail_size,
                None if job.cuts else caps,
                smallest=job.tail_smallest,
                granularity=job.tail_granularity,
            )
        max_forward = job.max_forward(caps)
        plan = Plan(
            epoch,
            first_step,
            tuple(decision.batch_size.tolist()),
            tail=None if tail is None else tuple(tail.tolist()),
            max_forward=None if max_forward is None else tuple(max_forward.tolist()),
            granularity=tuple(self._caps.cluster.granularity.tolist()) if job.cuts else None,
            reason=str(decision.reason),
        )
        return plan if self.claims is None else self.claims.marked(plan)

    def _check(self, decision: Decision[Any]) -> None:
        """Raise unless the sizes can be run as they are."""
        check_decision(decision, self._caps.cluster, name=type(self._policy).__name__)
