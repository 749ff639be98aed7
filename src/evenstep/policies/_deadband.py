"""Ignore small changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from .._types import Cluster, Decision, StepTimings
from .._valid import check_fields
from ._base import AbstractPolicy, check_policy
from ._splits import refit


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
