"""What takes a planner's place once something in it has failed: equal sizes, and no decisions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import final

from ..events import StepMeasured
from ._cost_planner import CostPlanner
from ._learnt import Learnt
from ._measured import measured
from ._plan import Outcome, Plan
from ._planner import Planner
from ._report import Report, timings_of

_REASON = "equal for the rest of the run: balancing is off, as something failed"


@final
class EqualSizes:
    """Plans equal sizes for the rest of a run, with what the driver asks of a ``Planner``.

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

    claims: None = None
    is_behind: bool = False
    keeps_for: float = math.inf  # no step moves a cap any more either

    def __init__(self, planner: Planner | CostPlanner, first_step: int) -> None:
        try:
            self.plan = planner.equal_plan(first_step, _REASON)
        except Exception:  # what failed may be what that needs
            epoch = planner.plan.epoch + 1
            self.plan = replace(
                planner.plan, epoch=epoch, first_step=first_step, first=None, reason=_REASON
            )

    def observe(self, reports: Sequence[Report], *, next_step: int, ask: bool = True) -> Outcome:
        """Return the plan: nothing follows from a step any more."""
        return Outcome(self.plan, ())

    def catch_up(self, *, next_step: int, ask: bool = True) -> Outcome:
        """Return the plan: nothing was put off."""
        return Outcome(self.plan, ())

    def account(self, reports: Sequence[Report], plan: Plan) -> StepMeasured | None:
        """Return what a step cost, and not what it would have cost otherwise."""
        if any(report.problem() for report in reports):
            return None
        return measured(reports, plan, timings_of(reports))

    def burden(self, step: int) -> None:
        """Return None: the workers' times are not known any more."""

    def learnt(self) -> Learnt | None:
        """Return None."""
        return None
