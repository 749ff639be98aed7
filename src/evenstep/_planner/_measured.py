"""What a step cost, as a fact."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .._types import StepTimings
from ..events import StepMeasured
from ._plan import Plan
from ._report import Report
from ._whatif import SplitCosts


def measured(
    reports: Sequence[Report],
    plan: Plan,
    timings: StepTimings,
    *,
    costs: SplitCosts | None = None,
) -> StepMeasured:
    """Return what a step cost.

    Args:
        reports: one from each rank, in order, all about the same step.
        plan: the one it ran under.
        timings: what they say.
        costs: what other splits would have cost, if that is known.
    """
    compute_s = np.where(timings.batch_size > 0, timings.compute_s, 0.0)
    makespan_s = float(compute_s.max())
    idle_s = makespan_s - compute_s
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
        speed_split_s=costs.speed_s if costs else None,
        cost_split_s=costs.cost_s if costs else None,
    )
