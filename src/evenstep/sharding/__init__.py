"""Which rank sums which bytes of the gradients, by what each link can carry."""

from ._aggregation import Aggregation as Aggregation
from ._base import AbstractSharePolicy as AbstractSharePolicy
from ._base import ShareDecision as ShareDecision
from ._closed_form import lower_bound_s as lower_bound_s
from ._equal import EqualShares as EqualShares
from ._exchange import best_num_chunks as best_num_chunks
from ._exchange import exchange_s as exchange_s
from ._fair import FairTransfers as FairTransfers
from ._fair import fair_transfers as fair_transfers
from ._linear_program import solve_shares as solve_shares
from ._links import Links as Links
from ._optimal import OptimalShares as OptimalShares
from ._optimum import equal_shares as equal_shares
from ._optimum import optimal_shares as optimal_shares
from ._plan import SharePlan as SharePlan
from ._plan import plan_shares as plan_shares
from ._proportional import ProportionalShares as ProportionalShares
from ._ranges import byte_edges as byte_edges
from ._ring import best_ring as best_ring
from ._ring import ring_s as ring_s
from ._split import Split as Split
from ._split import cut as cut
from ._split import traffic_bytes as traffic_bytes

__all__ = [
    "AbstractSharePolicy",
    "Aggregation",
    "EqualShares",
    "FairTransfers",
    "Links",
    "OptimalShares",
    "ProportionalShares",
    "ShareDecision",
    "SharePlan",
    "Split",
    "best_num_chunks",
    "best_ring",
    "byte_edges",
    "cut",
    "equal_shares",
    "exchange_s",
    "fair_transfers",
    "lower_bound_s",
    "optimal_shares",
    "plan_shares",
    "ring_s",
    "solve_shares",
    "traffic_bytes",
]
