"""The plans of a record, each in the step it was for; and who plans by a policy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, final

import numpy as np

from .._types import IntArray, StepTimings
from ..events import EstimatesRestored, Event, Rebalanced, SizesHeld, StepMeasured
from ..exceptions import invalid
from ..policies import AbstractPolicy, Equal, Replay
from ._base import AbstractPlanner, hold_after, rejected
from ._claim_switch import ClaimSwitch
from ._job import Job
from ._learnt import Learnt
from ._plan import Outcome, Plan, make_plan
from ._planner import Planner
from ._report import Report
from ._whatif import measured

_REASON = "as recorded"


def planner_of(
    policy: AbstractPolicy[Any], job: Job, *, first_step: int, claims: ClaimSwitch | None = None
) -> AbstractPlanner:
    """Return what plans by a policy where samples are counted.

    Args:
        policy: decides the sizes.
        job: what is planned for.
        first_step: number of the run's first step.
        claims: says when samples of a step are up for claims; None is never.

    Raises:
        ValueError: the bounds leave no way to split the global batch; or ``policy`` is a record of
            another run, or goes with something that records have not.
    """
    if not isinstance(policy, Replay):
        inner: AbstractPolicy[Any] | None = policy
        while (inner := getattr(inner, "policy", None)) is not None:
            if isinstance(inner, Replay):
                rule = "have `Replay` by itself: a wrapper would change what is repeated"
                raise invalid("Balancer(policy=...)", rule, policy, f"Use `{inner!r}`.")
        return Planner(policy, job, claims=claims)
    if claims is not None:
        rule = "be left out with `Replay`, as records do not hold what was claimed"
        raise invalid("Runtime(claims=...)", rule, "claims", "Leave `claims` out.")
    return ReplayPlanner(policy, job, first_step=first_step)


@final
class ReplayPlanner(AbstractPlanner):
    """Repeats the plans of a record, in the steps they were for, whatever ranks report.

    Nothing is learnt, and no cap of memory changes a plan. All plans are told, even one that
    another replaced before a step used it: each moves samples from rank to rank.

    Args:
        policy: holds the record.
        job: what is planned for.
        first_step: number of the run's first step.

    Raises:
        ValueError: the record is of another number of workers, global batch or first step.
    """

    def __init__(self, policy: Replay, job: Job, *, first_step: int) -> None:
        policy.check(job.world_size, job.global_batch_size)
        self._run, self._record, self._job = policy.run, policy.record, job
        if first_step != self._record.first_step:
            raise invalid(
                "Replay(run=...)",
                f"have a record from step {first_step} on, where this run begins",
                f"one from step {self._record.first_step} on in {policy.run}",
                "Begin at that step: from the same checkpoint, or from none.",
            )
        self._caps = job.caps()
        self._cluster = job.cluster(self._caps)
        self._now = first_step  # the newest step whose plan is told
        self._hold = 1  # steps, as far as their length goes
        self._num_told = 1  # of the plans, as events
        self._is_past_end = False
        self.plan = self._make_plan(0)

    def come_to(self, step: int) -> Iterator[Plan]:
        self._now = max(self._now, step)
        while self._begin_of(self.plan.epoch + 1) <= step:
            self.plan = self._make_plan(self.plan.epoch + 1)
            yield self.plan

    @property
    def hold(self) -> int:
        return int(min(self._hold, max(1, self._begin_of(self.plan.epoch + 1) - self._now)))

    def observe(self, reports: Sequence[Report], *, next_step: int, ask: bool = True) -> Outcome:
        events: list[Event] = [*rejected(reports)]
        self._hold = hold_after(reports)
        while self._begin_of(self._num_told) <= next_step:
            plan = self._make_plan(self._num_told)
            self._num_told += 1
            sizes = plan.batch_size, plan.reason, plan.max_forward
            events.append(Rebalanced(plan.first_step, plan.epoch, *sizes))
        step, last = reports[0].step, self._record.last_step
        if step > last and not self._is_past_end:
            self._is_past_end = True
            events.append(SizesHeld(step, f"the record in {self._run} ends with step {last}"))
        return Outcome(self.plan, tuple(events))

    def _account(self, reports: Sequence[Report], plan: Plan, timings: StepTimings) -> StepMeasured:
        return measured(reports, plan, timings)

    def equal_plan(self, first_step: int, reason: str) -> Plan:
        sizes = Equal().init(self._cluster).batch_size
        return make_plan(
            self._job,
            sizes,
            epoch=self.plan.epoch + 1,
            first_step=first_step,
            cluster=self._cluster,
            caps=self._caps,
            reason=reason,
        )

    def burden(self, step: int) -> None:
        return None

    def learnt(self) -> None:
        return None

    def restore(self, learnt: Learnt, former: IntArray) -> EstimatesRestored:
        return EstimatesRestored(tuple((former >= 0).tolist()), "anew", self.plan.batch_size)

    def _begin_of(self, epoch: int) -> float:
        """Return the first step of a plan; infinite past the last."""
        plans = self._record.plans
        return plans[epoch].first_step if epoch < len(plans) else math.inf

    def _make_plan(self, epoch: int) -> Plan:
        recorded, job = self._record.plans[epoch], self._job
        plan = make_plan(
            job,
            np.array(recorded.batch_size, np.int64),
            epoch=epoch,
            first_step=recorded.first_step if epoch else 0,
            cluster=self._cluster,
            caps=self._caps,
            reason=_REASON,
        )
        if recorded.tail is not None and sum(recorded.tail) == job.tail_size:
            plan = replace(plan, tail=recorded.tail)
        if job.cuts and recorded.max_forward is not None:
            plan = replace(plan, max_forward=recorded.max_forward)
        return plan
