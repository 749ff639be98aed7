"""Policies around a policy: small changes ignored, every n-th step alone, whole multiples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import numpy as np

from .._types import Cluster, Decision, StepTimings
from .._valid import check_fields
from ._base import AbstractPolicy, check_policy, refit


@final
@dataclass(frozen=True, slots=True)
class Deadband(AbstractPolicy[dict[str, Any]]):
    r"""Another policy, whose new split is adopted only if some worker's batch changes enough.

    The split stays while $\max_r |b^\mathrm{new}_r - b_r| / b_r \le$ ``threshold``. Right if
    resizes are expensive: kernels tuned per shape, compiled graphs, fetched samples that change
    their rank. If small differences last, it costs up to about ``threshold`` of the step.

    Args:
        policy: the policy that decides; it sees every step.
        threshold: largest relative change that is ignored, at least 0.

    Raises:
        ValueError: ``policy`` is not a policy, or ``threshold`` is negative.
    """

    name: ClassVar[str] = "deadband"

    policy: AbstractPolicy[Any]
    threshold: float

    def __post_init__(self) -> None:
        check_policy("Deadband(policy=...)", self.policy)
        check_fields(self, threshold=("at least 0", "0.05 is 5 %."))

    @property
    def reading_s(self) -> float:
        return self.policy.reading_s

    def init(self, cluster: Cluster) -> Decision[dict[str, Any]]:
        first = self.policy.init(cluster)
        state = {"held": first.batch_size, "inner": first.state}
        return Decision(first.batch_size, state, first.reason, first.level)

    def update(
        self, cluster: Cluster, timings: StepTimings, state: dict[str, Any]
    ) -> Decision[dict[str, Any]]:
        wanted = self.policy.update(cluster, timings, state["inner"])
        held = refit(state["held"], cluster)
        change = float((abs(wanted.batch_size - held) / np.maximum(held, 1)).max())
        if 0 < change <= self.threshold:
            reason = f"held: change of {change:.1%} within {self.threshold:.1%}"
            return Decision(held, {"held": held, "inner": wanted.state}, reason, wanted.level)
        state = {"held": wanted.batch_size, "inner": wanted.state}
        return Decision(wanted.batch_size, state, wanted.reason, wanted.level)


@final
@dataclass(frozen=True, slots=True)
class Every(AbstractPolicy[dict[str, Any]]):
    """Another policy, whose split is adopted at every ``num_steps``-th step.

    In between the split stays, and the policy continues to learn from every step. Right if resizes
    are expensive: with the steps of an epoch as ``num_steps``, sizes change as often as in
    OmniLearn and DBS. It takes ``num_steps`` / 2 steps on average to react to a change of speed.

    Args:
        policy: the policy that decides; it sees every step.
        num_steps: steps between changes, at least 1. With 1, the policy is followed as it is.

    Raises:
        ValueError: ``policy`` is not a policy, or ``num_steps`` is below 1.
    """

    name: ClassVar[str] = "every"

    policy: AbstractPolicy[Any]
    num_steps: int

    def __post_init__(self) -> None:
        check_policy("Every(policy=...)", self.policy)
        check_fields(self, num_steps=("at least 1", "Use 1 for every step."))

    @property
    def reading_s(self) -> float:
        return self.policy.reading_s

    def init(self, cluster: Cluster) -> Decision[dict[str, Any]]:
        first = self.policy.init(cluster)
        state = {"held": first.batch_size, "inner": first.state, "num_steps": 0}
        return Decision(first.batch_size, state, first.reason, first.level)

    def update(
        self, cluster: Cluster, timings: StepTimings, state: dict[str, Any]
    ) -> Decision[dict[str, Any]]:
        wanted = self.policy.update(cluster, timings, state["inner"])
        num_steps = state["num_steps"] + timings.num_steps
        batch_size, reason = wanted.batch_size, wanted.reason
        if num_steps < self.num_steps:
            batch_size = refit(state["held"], cluster)
            reason = f"held: step {num_steps} of {self.num_steps}"
        left = num_steps % self.num_steps
        state = {"held": batch_size, "inner": wanted.state, "num_steps": left}
        # A promise to keep what it wants says nothing about sizes that wait for their turn.
        level = wanted.level if np.array_equal(wanted.batch_size, batch_size) else 0.0
        return Decision(batch_size, state, reason, level)


@final
@dataclass(frozen=True, slots=True)
class RoundTo(AbstractPolicy[Any]):
    """Another policy, which decides in multiples of ``granularity`` if the bounds allow.

    The policy sees a cluster with that granularity, so an exact policy stays exact. All workers but
    one have whole multiples, and that one carries the remainder. Right for kernels that work in
    tiles, and to keep the number of shapes small. It costs about half a multiple's time per step.

    A worker whose bounds leave no room for a multiple keeps its own granularity. If no split is
    possible at all, all workers keep theirs, and the reason says so. ``Cluster(granularity=...)``
    enforces a granularity.

    Args:
        policy: the policy that decides.
        granularity: samples, at least 1. Workers with a granularity of their own get a common
            multiple.

    Raises:
        ValueError: ``policy`` is not a policy, or ``granularity`` is below 1.
    """

    name: ClassVar[str] = "round-to"

    policy: AbstractPolicy[Any]
    granularity: int

    def __post_init__(self) -> None:
        check_policy("RoundTo(policy=...)", self.policy)
        check_fields(self, granularity=("an integer of at least 1", "Use 8 for tiles of 8."))

    @property
    def reading_s(self) -> float:
        return self.policy.reading_s

    def init(self, cluster: Cluster) -> Decision[Any]:
        coarse = self._coarse(cluster)
        return self._rounded(self.policy.init(coarse or cluster), coarse)

    def update(self, cluster: Cluster, timings: StepTimings, state: Any) -> Decision[Any]:
        coarse = self._coarse(cluster)
        return self._rounded(self.policy.update(coarse or cluster, timings, state), coarse)

    def _rounded(self, decision: Decision[Any], coarse: Cluster | None) -> Decision[Any]:
        """Return the decision, with a word if the wish was not granted."""
        if coarse is not None:
            return decision
        reason = f"{decision.reason} (bounds leave no split in multiples of {self.granularity})"
        return replace(decision, reason=reason)

    def _coarse(self, cluster: Cluster) -> Cluster | None:
        """Return ``cluster`` in the larger granules, or None if they leave no way to split."""
        lo, hi, total = cluster.min_batch_size, cluster.max_batch_size, cluster.global_batch_size
        common = np.lcm(cluster.granularity, self.granularity)
        fits = -(-lo // common) * common <= np.where(hi < total, hi // common * common, total)
        granularity = np.where(fits, common, cluster.granularity)
        try:
            return replace(cluster, granularity=granularity)
        except ValueError:
            return None
