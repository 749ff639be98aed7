"""Unequal links: which rank sums which bytes of the gradients, followed as links change.

Pure decisions are in `_plans` (shares for given links) and `_following` (links from what exchanges
took, and shares for the next). `_messages` carries them between ranks. Adapters are on top:
``_torch`` sums gradients by shares, and ``evenstep.network.sim`` plays exchanges.
Training reaches this room by ``Balancer(network=...)`` alone, and without it imports none of it.
"""

from ._following._share_planner import SharePlanner
from ._plans._aggregation import Aggregation, Links
from ._plans._duration import exchange_s
from ._plans._optimum import optimal_shares
from ._plans._share_plan import Split, plan_shares, traffic_bytes
from ._plans._share_policies import EqualShares, OptimalShares, ProportionalShares

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
