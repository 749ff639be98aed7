"""The optimal shares, held until others are clearly faster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from ...exceptions import invalid
from ._aggregation import Aggregation
from ._bandwidths import Links
from ._base import AbstractSharePolicy, ShareDecision
from ._duration import exchange_s
from ._optimum import equal_shares, formula_shares, optimal_shares


@final
@dataclass(frozen=True, slots=True)
class OptimalShares(AbstractSharePolicy[dict[str, Any]]):
    r"""The shares of ``optimal_shares``, adopted if they are clearly faster than the current ones.

    New shares are adopted if those in force would take more than ``1 + margin`` times as long on
    the links as they are now measured.

    Right for links that are measured under load and stay the same for longer than the measurement.
    Wrong if links change from step to step. If ``optimal_shares`` needs scipy and it is not
    installed, the best shares with a closed form are taken, and the reason says so.

    Args:
        margin: the gain that a change needs, at least 0. With 0 every measurement changes the
            shares (no data moves). ``SharePlanner`` has a dead band of its own, to which this one
            adds.

    Raises:
        ValueError: ``margin`` is negative or not finite.
    """

    name: ClassVar[str] = "optimal"

    margin: float = 0.02

    def __post_init__(self) -> None:
        if not (np.isfinite(self.margin) and self.margin >= 0):
            rule = "be finite and at least 0"
            raise invalid("OptimalShares(margin=...)", rule, self.margin, "0.02 is 2 %.")

    def init(self, aggregation: Aggregation) -> ShareDecision[dict[str, Any]]:
        shares = equal_shares(aggregation)
        return ShareDecision(shares, {"held": shares}, "equal: no link is measured")

    def update(
        self, aggregation: Aggregation, links: Links, state: dict[str, Any]
    ) -> ShareDecision[dict[str, Any]]:
        kind = "optimal"
        try:
            wanted = optimal_shares(aggregation, links)
        except ImportError:
            kind = "by formula, as there is no scipy"
            wanted = formula_shares(aggregation, links)
        held = state["held"]
        held_s = exchange_s(aggregation, links, shares=held)
        wanted_s = exchange_s(aggregation, links, shares=wanted)
        if held_s <= wanted_s * (1 + self.margin):
            reason = f"held: {held_s:.3g} s, the best shares {wanted_s:.3g} s"
            return ShareDecision(held, state, reason)
        reason = f"{kind}: {wanted_s:.3g} s instead of {held_s:.3g} s"
        return ShareDecision(wanted, {"held": wanted}, reason)
