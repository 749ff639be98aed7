"""Reports in, plans out: what a driver needs around a policy.

Bounds and memory caps, the last good plan, the tail of an epoch, claims, the what-if.
"""

from ._base import AbstractPlanner as AbstractPlanner
from ._base import ClaimSwitch as ClaimSwitch
from ._base import EqualSizes as EqualSizes
from ._base import UserMistake as UserMistake
from ._base import blaming as blaming
from ._base import in_words as in_words
from ._cost_planner import CostChoice as CostChoice
from ._cost_planner import CostPlanner as CostPlanner
from ._job import Bounds as Bounds
from ._job import Job as Job
from ._learnt import Learnt as Learnt
from ._learnt import check_learnt as check_learnt
from ._learnt import places as places
from ._plan import MOST_STEPS as MOST_STEPS
from ._plan import Plan as Plan
from ._plan import PlanCosts as PlanCosts
from ._plan import Report as Report
from ._plan import Work as Work
from ._planner import Planner as Planner
from ._sample_costs import UNKNOWN as UNKNOWN
from ._sample_costs import Cost as Cost
from ._sample_costs import SampleCosts as SampleCosts
from ._sample_costs import assign as assign
from ._sample_costs import batch_lengths as batch_lengths
from ._sample_costs import fitted as fitted
from ._sample_costs import of_lengths as of_lengths
from ._sample_costs import sample_length as sample_length
