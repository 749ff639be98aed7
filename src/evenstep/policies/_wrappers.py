"""Policies around a policy: small changes ignored, every n-th step alone."""

from __future__ import annotations

from dataclasses import dataclass
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
