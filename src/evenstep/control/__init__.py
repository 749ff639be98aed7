"""What a driver needs around a policy: plans, the last good one, the tail, the what-if."""

from ._bounds import Bounds as Bounds
from ._claims import ClaimSwitch as ClaimSwitch
from ._job import Job as Job
from ._learnt import Learnt as Learnt
from ._learnt import alike as alike
from ._learnt import places as places
from ._plan import Plan as Plan
from ._planner import Outcome as Outcome
from ._planner import Planner as Planner
from ._report import Report as Report

__all__ = [
    "Bounds",
    "ClaimSwitch",
    "Job",
    "Learnt",
    "Outcome",
    "Plan",
    "Planner",
    "Report",
    "alike",
    "places",
]
