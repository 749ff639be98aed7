"""Shares in proportion to each server's slowest link, after the 2023 paper as far as it goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from ..._types import FloatArray
from ...exceptions import invalid
from ._aggregation import Aggregation
from ._bandwidths import Links, check_world
from ._base import AbstractSharePolicy, ShareDecision
from ._optimum import equal_shares


@final
@dataclass(frozen=True, slots=True)
class ProportionalShares(AbstractSharePolicy[dict[str, Any]]):
    r"""Shares in proportion to the slowest link between a server and the workers.

    $w_j = \frac{s_j}{\sum_k s_k}, \quad s_j = \min_{i \ne j} \min(B_{ij}, B_{ji})$ over workers
    $i$, with $B_{ij}$ what goes from $i$ to $j$: the pair's bandwidth, at most $i$'s up and $j$'s
    down.

    **A reconstruction.** Of the paper only the abstract is known: unbalanced servers waste
    bandwidth, so sense the network and shift load ahead of time. The score and the rule are
    those of later public work by one of its authors, whose trees are here a star. Left out: it
    may drop the worst servers, and rounds up to chunks.

    Optimal for dedicated servers whose links are the slowest on each way, and near it on meshes of
    unequal pairs: with links drawn from 20 to 155, 1.34 to 1.52 times as fast as equal shares,
    where the linear program is 1.56 to 1.84. Wrong for collocated servers behind one link per
    rank: a single slow rank is the slowest way of every other, so that all score alike.

    Args:
        threshold: mean relative change of the scores above which shares follow, at least 0. At 0
            they always do.

    Raises:
        ValueError: ``threshold`` is negative or not finite.

    References:
        *Adaptive Load Balancing for Parameter Servers in Distributed Machine Learning over
        Heterogeneous Networks*, ZTE Communications 21(1), 2023, DOI 10.12142/ZTECOM.202301009
        (abstract); NetStorm, arXiv 2404.11352, for the rule.
    """

    name: ClassVar[str] = "proportional"

    threshold: float = 0.0

    def __post_init__(self) -> None:
        if not (np.isfinite(self.threshold) and self.threshold >= 0):
            remedy = "0 follows every change, 0.1 one of 10 %."
            rule = "be finite and at least 0"
            raise invalid("ProportionalShares(threshold=...)", rule, self.threshold, remedy)

    def init(self, aggregation: Aggregation) -> ShareDecision[dict[str, Any]]:
        unknown = np.zeros(aggregation.world_size)
        return ShareDecision(
            equal_shares(aggregation), {"scores": unknown}, "equal: no link is measured"
        )

    def update(
        self, aggregation: Aggregation, links: Links, state: dict[str, Any]
    ) -> ShareDecision[dict[str, Any]]:
        check_world("ProportionalShares.update", aggregation, links)
        scores, held = _scores(aggregation, links), state["scores"]
        serves = aggregation.is_server
        if held.any():
            change = float(abs(scores[serves] / held[serves] - 1).mean())
            if change <= self.threshold:
                reason = f"held: links changed by {change:.1%} on average"
                return ShareDecision(held / held.sum(), state, reason)
        slow = int(np.argmin(np.where(serves, scores, np.inf)))
        reason = f"proportional: rank {slow}'s slowest link carries {scores[slow]:.3g} bytes/s"
        return ShareDecision(scores / scores.sum(), {"scores": scores}, reason)


def _scores(aggregation: Aggregation, links: Links) -> FloatArray:
    """Return each server's slowest link to or from another rank that works, 0 for the others."""
    ways = np.minimum(links.up_bytes_per_s[:, None], links.down_bytes_per_s[None, :])
    if links.pair_bytes_per_s is not None:
        ways = np.minimum(ways, links.pair_bytes_per_s)
    either = np.minimum(ways, ways.T)
    np.fill_diagonal(either, np.inf)
    slowest = either[aggregation.is_worker].min(axis=0)
    alone = np.isinf(slowest)  # the only worker, as a server of its own
    scores: FloatArray = np.where(alone, links.bandwidth_bytes_per_s, slowest)
    return np.where(aggregation.is_server, scores, 0.0)
