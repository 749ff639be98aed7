"""What a share policy makes of links, and how good its shares are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, final

import numpy as np

from ..._planner import blaming
from ..._types import FloatArray
from .._plans._aggregation import Aggregation
from .._plans._bandwidths import Links
from .._plans._base import AbstractSharePolicy, ShareDecision
from .._plans._duration import check_shares, exchange_s
from .._plans._optimum import equal_shares
from .._plans._ring import ring_s

PROBE_EQUAL = 0.25  # part of a probe that goes to all alike, whatever was known of the links
MOST_PROBE = 4.0  # times all-reduce, or best shares, that a probe may take by what was known
SERVER_PROBE, LEAST_PROBED = 1.4, 0.02  # times its part that a server gets to see what it carries


@final
class ShareChoice:
    """A policy at work on one aggregation: its state, and the links as it is shown them.

    Args:
        policy: decides the shares.
        aggregation: what is summed, by whom, in how many chunks.
    """

    def __init__(self, policy: AbstractSharePolicy[Any], aggregation: Aggregation) -> None:
        self._policy, self._aggregation = policy, aggregation
        self._state = policy.init(aggregation).state

    def on(self, links: Links) -> ShareDecision[Any]:
        """Return what the policy decides on links, whatever those carry that have no share.

        Raises:
            UserMistake: a user's policy raised, or what it gave are no shares.
        """
        hopeful = self._hopeful(links)
        with blaming(self._policy):
            decision = self._policy.update(self._aggregation, hopeful, self._state)
            check_shares("plan_shares", self._aggregation, decision.shares)
        return decision

    def keep(self, decision: ShareDecision[Any]) -> None:
        """Note that the decision is in force."""
        self._state = decision.state

    def to_probe(self, links: Links | None) -> FloatArray:
        """Return shares that show the links: equal ones, or nearer to what was best.

        The nearer, the longer a link that is known to be slow would keep all waiting.
        """
        probed: FloatArray = equal_shares(self._aggregation)
        if links is None:
            return probed
        equal, best = probed, self.on(links).shares
        most_s = MOST_PROBE * max(self.seconds(links, None), self.seconds(links, best))
        for halvings in range(8):
            part = PROBE_EQUAL / 2**halvings
            probed = part * equal + (1 - part) * best
            if self.seconds(links, probed) <= most_s:
                break
        return probed

    def to_probe_server(self, shares: FloatArray, rank: int) -> FloatArray:
        """Return shares of which one rank has more, to see whether its link carries that."""
        probed = shares.copy()
        probed[rank] = max(SERVER_PROBE * probed[rank], LEAST_PROBED)
        probed /= probed.sum()
        return probed

    def seconds(self, links: Links, shares: FloatArray | None) -> float:
        """Return what an exchange takes, by a ring without shares."""
        if shares is None:
            return ring_s(self._aggregation, links)
        return exchange_s(self._aggregation, links, shares=shares)

    def seconds_of_servers(self, links: Links, shares: FloatArray) -> float:
        """Return what an exchange takes if ranks that only work are no limit."""
        return self.seconds(self._hopeful(links), shares)

    def _hopeful(self, links: Links) -> Links:
        """Return the links, those of ranks that only work so fast that they are no limit.

        What they carry is hard to tell from what servers let them have, and no shares change it:
        those that suit the servers are as good as any, at least in many chunks.
        """
        aggregation = self._aggregation
        only_work = aggregation.is_worker & ~aggregation.is_server
        up, down = links.up_bytes_per_s, links.down_bytes_per_s
        return replace(
            links,
            up_bytes_per_s=np.where(only_work, up.sum(), up),
            down_bytes_per_s=np.where(only_work, down.sum(), down),
        )
