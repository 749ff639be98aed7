"""Unequal links: which rank sums which bytes of the gradients, followed as links change.

Pure decisions are in `_plans` (shares for given links) and `_following` (links from what exchanges
took, and shares for the next). `_messages` carries them between ranks. Adapters are on top:
``_torch`` sums gradients by shares, and ``evenstep.network.sim`` plays exchanges.
Training reaches this room by ``Balancer(network=...)`` alone, and without it imports none of it.
"""

from ._following._share_planner import SharePlanner as SharePlanner
from ._plans._aggregation import Aggregation as Aggregation
from ._plans._aggregation import Links as Links
from ._plans._duration import exchange_s as exchange_s
from ._plans._optimum import optimal_shares as optimal_shares
from ._plans._share_plan import Split as Split
from ._plans._share_plan import plan_shares as plan_shares
from ._plans._share_plan import traffic_bytes as traffic_bytes
from ._plans._share_policies import EqualShares as EqualShares
from ._plans._share_policies import OptimalShares as OptimalShares
from ._plans._share_policies import ProportionalShares as ProportionalShares

__all__ = [
    "Aggregation",
    "EqualShares",
    "Links",
    "OptimalShares",
    "ProportionalShares",
    "SharePlanner",
    "Split",
    "exchange_s",
    "optimal_shares",
    "plan_shares",
    "traffic_bytes",
]
