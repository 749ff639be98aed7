"""The same share for every server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from ._aggregation import Aggregation
from ._bandwidths import Links
from ._base import AbstractSharePolicy, ShareDecision
from ._optimum import equal_shares


@final
@dataclass(frozen=True, slots=True)
class EqualShares(AbstractSharePolicy[None]):
    r"""Every server sums equally many bytes, whatever its link carries.

    $w_i = 1 / n$ over $n$ servers, as in sharded parameter servers and ZeRO. Optimal if links are
    equal; and for collocated servers with a barrier between push and pull, if links are equally
    fast in both directions. Wrong for dedicated servers with different links: the slowest
    determines the time.
    """

    name: ClassVar[str] = "equal"

    def init(self, aggregation: Aggregation) -> ShareDecision[None]:
        reason = f"equal: the same share for {int(aggregation.is_server.sum())} servers"
        return ShareDecision(equal_shares(aggregation), None, reason)

    def update(self, aggregation: Aggregation, links: Links, state: None) -> ShareDecision[None]:
        return self.init(aggregation)
