"""What takes a planner's place once something in it has failed: equal sizes, and no decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

from .._types import IntArray, StepTimings
from ..events import EstimatesRestored, StepMeasured
from ._base import AbstractPlanner, hold_after
from ._learnt import Learnt
from ._measured import measured
from ._plan import Outcome, Plan
from ._report import Report

_REASON = "equal for the rest of the run: balancing is off, as something failed"


@final
class EqualSizes(AbstractPlanner):
    """Plans equal sizes for the rest of a run, in the place of the planner that failed.

    Of the planner that failed it takes the plan and what fits, and nothing else: what that one has
    learnt may be half changed. So it has learnt nothing, and a run that goes on from its
    checkpoint begins anew.

    Args:
        planner: the one that failed.
        first_step: first step that can still use a new plan.

    Attributes:
        plan: what is in force from ``first_step`` on. The sizes of before, should even equal ones
            fail.
    """

    hold = 1

    def __init__(self, planner: AbstractPlanner, first_step: int) -> None:
        try:
            self.plan = planner.equal_plan(first_step, _REASON)
        except Exception:  # what failed may be what that needs
            self.plan = replace(
                planner.plan,
                epoch=planner.plan.epoch + 1,
                first_step=first_step,
                first=None,
                reason=_REASON,
            )

    def observe(self, reports: Sequence[Report], *, next_step: int, ask: bool = True) -> Outcome:
        self.hold = hold_after(reports)
        return Outcome(self.plan, ())  # nothing follows from a step any more

    def _account(self, reports: Sequence[Report], plan: Plan, timings: StepTimings) -> StepMeasured:
        return measured(reports, plan, timings)  # not what it would have cost otherwise

    def equal_plan(self, first_step: int, reason: str) -> Plan:
        return self.plan

    def burden(self, step: int) -> None:
        return None  # the workers' times are not known any more

    def learnt(self) -> None:
        return None

    def restore(self, learnt: Learnt, former: IntArray) -> EstimatesRestored:
        return EstimatesRestored(tuple((former >= 0).tolist()), "anew", self.plan.batch_size)
