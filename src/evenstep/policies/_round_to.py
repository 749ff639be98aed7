"""Whole multiples of a size that kernels like."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import numpy as np

from .._types import Cluster, Decision, StepTimings
from ..exceptions import invalid
from ._base import AbstractPolicy, check_policy


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
        if not isinstance(self.granularity, int | np.integer) or self.granularity < 1:
            raise invalid(
                "RoundTo(granularity=...)",
                "be an integer of at least 1",
                self.granularity,
                "Use 8 for tiles of 8.",
            )

    @property
    def reading_s(self) -> float:
        return self.policy.reading_s

    def init(self, cluster: Cluster) -> Decision[Any]:
        coarse = self._coarse(cluster)
        return self._told(self.policy.init(coarse or cluster), coarse)

    def update(self, cluster: Cluster, timings: StepTimings, state: Any) -> Decision[Any]:
        coarse = self._coarse(cluster)
        return self._told(self.policy.update(coarse or cluster, timings, state), coarse)

    def _told(self, decision: Decision[Any], coarse: Cluster | None) -> Decision[Any]:
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
