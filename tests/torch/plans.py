"""Policies that make trouble on purpose: plans that change at every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from evenstep import Cluster, Decision, StepTimings, apportion
from evenstep.policies import AbstractPolicy


@final
@dataclass(frozen=True, slots=True)
class Restless(AbstractPolicy[int]):
    """New random sizes after every step, whatever was measured."""

    seed: int = 0
    name = "restless"

    def init(self, cluster: Cluster) -> Decision[int]:
        return self._draw(cluster, 0)

    def update(self, cluster: Cluster, timings: StepTimings, state: int) -> Decision[int]:
        return self._draw(cluster, state)

    def _draw(self, cluster: Cluster, count: int) -> Decision[int]:
        shares = np.random.default_rng((self.seed, count)).uniform(0.05, 1.0, cluster.world_size)
        return Decision(apportion(shares, cluster), count + 1, reason=f"drawn: number {count}")


@final
@dataclass(frozen=True, slots=True)
class Greedy(AbstractPolicy[None]):
    """Gives rank 0 all that the bounds allow."""

    name = "greedy"

    def init(self, cluster: Cluster) -> Decision[None]:
        return Decision(apportion(np.ones(cluster.world_size), cluster), None, reason="equal")

    def update(self, cluster: Cluster, timings: StepTimings, state: None) -> Decision[None]:
        shares = np.zeros(cluster.world_size)
        shares[0] = 1.0
        return Decision(apportion(shares, cluster), None, reason="all to rank 0")
