"""Whether shares are worth it, and what they are in bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..._types import FloatArray, IntArray
from ...exceptions import invalid
from ._aggregation import Aggregation
from ._bandwidths import Links
from ._closed_form import lower_bound_s
from ._duration import exchange_s
from ._optimum import equal_shares
from ._ranges import byte_edges
from ._ring import MOST_WORKERS, best_ring, ring_s


@dataclass(frozen=True, slots=True, eq=False)
class SharePlan:
    """What each rank sums, what that takes by the model, and what else would.

    Attributes:
        edges: rank r sums bytes ``edges[r]`` to ``edges[r + 1]``, ``(world_size + 1,)``.
        exchange_s: predicted seconds of push and pull with these ranges.
        equal_s: likewise with equal shares.
        ring_s: of plain all-reduce, a ring in rank order.
        best_ring_s: of a ring in the best order; ``ring_s`` where there are more than 12 workers.
        lower_bound_s: what no shares can beat.
        falls_back: whether plain all-reduce is to be used, ranges or not.
        reason: why, in words.
    """

    edges: IntArray
    exchange_s: float
    equal_s: float
    ring_s: float
    best_ring_s: float
    lower_bound_s: float
    falls_back: bool
    reason: str

    @property
    def shares(self) -> FloatArray:
        """What the ranges are of all bytes, ``(world_size,)``."""
        shares: FloatArray = np.diff(self.edges) / self.edges[-1]
        return shares

    @property
    def gain(self) -> float:
        """How many times as fast as plain all-reduce the ranges are predicted to be."""
        return self.ring_s / self.exchange_s if self.exchange_s > 0 else 1.0


def plan_shares(
    aggregation: Aggregation, links: Links, *, shares: FloatArray, margin: float = 0.15
) -> SharePlan:
    """Turn shares into ranges of bytes, and compare them with plain all-reduce.

    The plan falls back to plain all-reduce, and says so, unless a ring in rank order is predicted
    to take more than ``1 + margin`` times as long. The ranges count, not the shares: what
    rounding and the smallest size changed is in the prediction.

    Args:
        aggregation: what is summed, by whom, in how many chunks.
        links: their bandwidths.
        shares: as a policy decided them, ``(world_size,)``.
        margin: what shares have to gain, at least 0. On equal links, where model and ring agree,
            exchanges of this kind were measured to be up to 15 % slower than all-reduce.

    Raises:
        ValueError: the links or shares are of other ranks, or ``margin`` is out of range.
    """
    if not (np.isfinite(margin) and margin >= 0):
        rule, remedy = "be finite and at least 0", "0.15 is 15 %."
        raise invalid("plan_shares(margin=...)", rule, margin, remedy)
    edges = byte_edges(aggregation, shares=shares)
    exact_s = exchange_s(aggregation, links, shares=np.diff(edges) / edges[-1])
    plain_s = best_s = ring_s(aggregation, links)
    if aggregation.num_workers <= MOST_WORKERS:
        best_s = ring_s(aggregation, links, order=best_ring(aggregation, links).tolist())
    bound_s = lower_bound_s(aggregation, links)
    falls_back = not plain_s > exact_s * (1 + margin)
    return SharePlan(
        edges,
        exact_s,
        exchange_s(aggregation, links, shares=equal_shares(aggregation)),
        plain_s,
        best_s,
        bound_s,
        falls_back,
        _reason(aggregation, exact_s, plain_s, best_s, bound_s, margin),
    )


def _reason(
    aggregation: Aggregation,
    exact_s: float,
    plain_s: float,
    best_s: float,
    bound_s: float,
    margin: float,
) -> str:
    if aggregation.num_workers == 1:
        return "plain all-reduce: a single worker has nothing to sum"
    compared = f"{exact_s:.3g} s against {plain_s:.3g} s of a ring"
    if plain_s > exact_s * (1 + margin):
        reason = f"shares: {compared}, {plain_s / exact_s:.2f} times as fast"
    elif plain_s > bound_s * (1 + margin):
        reason = f"plain all-reduce: these shares take {compared}, no gain of {margin:.0%}"
    else:
        reason = f"plain all-reduce: no shares gain {margin:.0%} here, these take {compared}"
    if best_s < min(plain_s, exact_s):
        reason += f"; a ring in another order would take {best_s:.3g} s"
    return reason
