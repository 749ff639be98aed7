"""Sizes that stay, equal or chosen; and wrappers: small changes ignored, every n-th step alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import numpy as np

from .._types import Cluster, Decision, IntArray, StepTimings, check_fields, fill, sizes_of
from ..exceptions import invalid
from ._base import (
    READING_S,
    AbstractPolicy,
    check_one_each,
    check_policy,
    equal_split,
    is_feasible,
    refit,
)


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
        return replace(first, state={"held": first.batch_size, "inner": first.state})

    def update(
        self, cluster: Cluster, timings: StepTimings, state: dict[str, Any]
    ) -> Decision[dict[str, Any]]:
        wanted = self.policy.update(cluster, timings, state["inner"])
        held = refit(state["held"], cluster)
        change = float((abs(wanted.batch_size - held) / np.maximum(held, 1)).max())
        if 0 < change <= self.threshold:
            reason = f"held: change of {change:.1%} within {self.threshold:.1%}"
            return Decision(held, {"held": held, "inner": wanted.state}, reason, wanted.level)
        return replace(wanted, state={"held": wanted.batch_size, "inner": wanted.state})


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
        return replace(first, state=state)

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
class Equal(AbstractPolicy[None]):
    r"""Every worker gets the same batch, whatever is measured.

    $b_r = B / W$, as in plain data-parallel training. A step takes $\max_r t_r(B / W)$. Right if
    all workers are equally fast; and the baseline that every other policy has to beat. If bounds
    keep a worker from its share, the others divide the rest equally. A remainder goes to the lower
    ranks.
    """

    name: ClassVar[str] = "equal"

    @property
    def reading_s(self) -> float:
        return READING_S

    def init(self, cluster: Cluster) -> Decision[None]:
        return Decision(equal_split(cluster), None, "equal: the same batch for every worker", 1.0)

    def update(self, cluster: Cluster, timings: StepTimings, state: None) -> Decision[None]:
        return self.init(cluster)


@final
@dataclass(frozen=True, slots=True)
class Fixed(AbstractPolicy[None]):
    r"""The batch sizes given, whatever is measured.

    $b_r$ is constant. Right if speeds are known and never change, and for experiments with a
    certain split. Wrong as soon as another job uses one of the machines: sizes do not react.

    The sizes have to fit the cluster exactly when training starts. If the bounds become tighter
    later, because a batch does not fit in memory, the split stays as close to the given proportions
    as the new bounds allow, and the reason says so.

    Args:
        batch_size: local batch sizes in samples, one per rank, adding up to the global batch.

    Raises:
        ValueError: a size is no integer or is negative, or, in ``init``, the sizes do not suit
            the cluster.
    """

    name: ClassVar[str] = "fixed"

    batch_size: tuple[int, ...]

    def __post_init__(self) -> None:
        given = sizes_of("Fixed(batch_size=...)", self.batch_size)
        fill(self, batch_size=tuple(given.tolist()))  # of a list or an array, too

    @property
    def reading_s(self) -> float:
        return READING_S

    def init(self, cluster: Cluster) -> Decision[None]:
        wanted = self._sizes(cluster)
        if not is_feasible(wanted, cluster):
            raise invalid(
                "Fixed(batch_size=...)",
                f"add up to {cluster.global_batch_size}, within "
                f"{cluster.min_batch_size.tolist()} and {cluster.max_batch_size.tolist()}, in "
                f"granules of {cluster.granularity.tolist()} on all ranks but one",
                f"{list(self.batch_size)}, which add up to {sum(self.batch_size)}",
                "Change the sizes, or the global batch and the bounds.",
            )
        return Decision(wanted, None, "fixed: as given", 1.0)

    def update(self, cluster: Cluster, timings: StepTimings, state: None) -> Decision[None]:
        wanted = self._sizes(cluster)
        if is_feasible(wanted, cluster):
            return Decision(wanted, None, "fixed: as given", 1.0)
        return Decision(refit(wanted, cluster), None, "fixed: cut to the bounds in force", 1.0)

    def _sizes(self, cluster: Cluster) -> IntArray:
        check_one_each("Fixed(batch_size=...)", self.batch_size, cluster.world_size)
        return np.array(self.batch_size, np.int64)
