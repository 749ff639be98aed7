"""What a driver needs around a policy: plans, the last good one, the tail, the what-if."""

from ._blame import UserMistake as UserMistake
from ._blame import blaming as blaming
from ._blame import in_words as in_words
from ._bounds import Bounds as Bounds
from ._claims import ClaimSwitch as ClaimSwitch
from ._equal_sizes import EqualSizes as EqualSizes
from ._job import Job as Job
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
    "EqualSizes",
    "Exchange",
    "Job",
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
    "links_from_probes",
    "places",
    "timeline_s",
]
