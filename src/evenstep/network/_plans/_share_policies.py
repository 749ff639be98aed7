"""Share policies: their interface, and equal, optimal and proportional shares."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, final

import numpy as np

from ..._types import FloatArray, State, check_fields
from ._aggregation import Aggregation, Links, check_world
from ._duration import exchange_s
from ._optimum import equal_shares, formula_shares, optimal_shares


@dataclass(frozen=True, slots=True, eq=False)
class ShareDecision(Generic[State]):
    """What a share policy decided, what it remembers, and why.

    Attributes:
        shares: part of the bytes that each rank sums, at least 0, adding up to 1, and 0 for ranks
            that are not servers, ``(world_size,)``.
        state: passed to the next ``update``; as plain as that of ``evenstep.Decision``.
        reason: a few words for people.
    """

    shares: FloatArray
    state: State
    reason: str


class AbstractSharePolicy(abc.ABC, Generic[State]):
    """Decides which part of the gradients each server sums.

    Like ``evenstep.policies.AbstractPolicy`` for samples, it is an immutable value whose memory is
    the state, without I/O, clock or framework. It gets the measured links, smoothed if they are
    noisy. ``plan_shares`` decides whether its shares are worth using.

    Attributes:
        name: what configurations and reports call it, such as ``"optimal"``.
    """

    __slots__ = ()

    name: ClassVar[str] = ""

    @abc.abstractmethod
    def init(self, aggregation: Aggregation) -> State:
        """Return the state before any link is measured. Shares begin with the first ``update``."""

    @abc.abstractmethod
    def update(self, aggregation: Aggregation, links: Links, state: State) -> ShareDecision[State]:
        """Return the next decision, leaving all arguments as they are."""


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

    def init(self, aggregation: Aggregation) -> None:
        """Return nothing: there is nothing to remember."""

    def update(self, aggregation: Aggregation, links: Links, state: None) -> ShareDecision[None]:
        reason = f"equal: the same share for {int(aggregation.is_server.sum())} servers"
        return ShareDecision(equal_shares(aggregation), None, reason)


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
        check_fields(self, margin=("finite and at least 0", "0.02 is 2 %."))

    def init(self, aggregation: Aggregation) -> dict[str, Any]:
        return {"held": equal_shares(aggregation)}

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
        remedy = "0 follows every change, 0.1 one of 10 %."
        check_fields(self, threshold=("finite and at least 0", remedy))

    def init(self, aggregation: Aggregation) -> dict[str, Any]:
        return {"scores": np.zeros(aggregation.world_size)}

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
