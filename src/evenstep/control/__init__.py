"""What a driver needs around a policy: plans, the last good one, the tail, the what-if."""

from ._blame import UserMistake as UserMistake
from ._blame import blaming as blaming
from ._blame import in_words as in_words
from ._bounds import Bounds as Bounds
from ._claims import ClaimSwitch as ClaimSwitch
from ._computing import Computing as Computing
from ._equal_sizes import EqualSizes as EqualSizes
from ._job import Job as Job
from ._joint import JointPlan as JointPlan
from ._joint import joint_bound_s as joint_bound_s
from ._joint import plan_jointly as plan_jointly
from ._joint_sizes import JointSizes as JointSizes
from ._learnt import Learnt as Learnt
from ._learnt import check_learnt as check_learnt
from ._learnt import places as places
from ._link_tracker import LinkBelief as LinkBelief
from ._link_tracker import LinkTracker as LinkTracker
from ._plan import Outcome as Outcome
from ._plan import Plan as Plan
from ._planner import Planner as Planner
from ._probed import Probed as Probed
from ._probed import ProbeRound as ProbeRound
from ._probed import links_from_probes as links_from_probes
from ._probes import Probes as Probes
from ._report import Report as Report
from ._share_planner import SharePlanner as SharePlanner
from ._shares import ShareOutcome as ShareOutcome
from ._shares import SharesInForce as SharesInForce
from ._timeline import timeline_s as timeline_s
from ._transfers import Exchange as Exchange
from ._transfers import Transfers as Transfers

__all__ = [
    "Bounds",
    "ClaimSwitch",
    "Computing",
    "EqualSizes",
    "Exchange",
    "Job",
    "JointPlan",
    "JointSizes",
    "Learnt",
    "LinkBelief",
    "LinkTracker",
    "Outcome",
    "Plan",
    "Planner",
    "ProbeRound",
    "Probed",
    "Probes",
    "Report",
    "ShareOutcome",
    "SharePlanner",
    "SharesInForce",
    "Transfers",
    "UserMistake",
    "blaming",
    "check_learnt",
    "in_words",
    "joint_bound_s",
    "links_from_probes",
    "places",
    "plan_jointly",
    "timeline_s",
]
