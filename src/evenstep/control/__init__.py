"""What a driver needs around a policy: plans, the last good one, the tail, the what-if."""

from ._bounds import Bounds as Bounds
from ._plan import Plan as Plan
from ._planner import Job as Job
from ._planner import Outcome as Outcome
from ._planner import Planner as Planner
from ._report import Report as Report

__all__ = ["Bounds", "Job", "Outcome", "Plan", "Planner", "Report"]
