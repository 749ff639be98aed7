"""What `auto` is compared with: a single predictor with true fixed costs, and the papers' rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from evenstep import AffineTime, Cluster, Decision, StepTimings, allocate
from evenstep.policies import AbstractPolicy, Auto, DynamicBatching, Equal, Lbb, LbBsp2020
from evenstep.policies._base import equal_split
from evenstep.prediction import AbstractPredictor, Ema
from evenstep.sim import Scenario


@final
@dataclass(frozen=True, slots=True)
class Foreseen(AbstractPolicy[Any]):
    """The exact split for the speeds that one predictor foresees, told the true fixed costs.

    Args:
        predictor: foresees speeds in samples per second.
        intercept_s: fixed cost of every worker, ``(world_size,)``.
    """

    name: ClassVar[str] = "foreseen"

    predictor: AbstractPredictor[Any]
    intercept_s: tuple[float, ...]

    def init(self, cluster: Cluster) -> Decision[Any]:
        return Decision(equal_split(cluster), self.predictor.init(cluster.world_size), "equal")

    def update(self, cluster: Cluster, timings: StepTimings, state: Any) -> Decision[Any]:
        fixed_s = np.minimum(self.intercept_s, 0.99 * timings.compute_s)
        state = self.predictor.update(state, timings.batch_size / (timings.compute_s - fixed_s))
        times = AffineTime(np.array(self.intercept_s), 1 / self.predictor.predict(state))
        return Decision(allocate(times, cluster), state, "as foreseen")


def _told(make: Callable[[tuple[float, ...]], AbstractPolicy[Any]]) -> Rule:
    """Return a rule that is told the fixed costs, as a profile would."""
    return lambda given: make(tuple(given.workload.intercept_s.tolist()))


Rule = Callable[[Scenario], AbstractPolicy[Any]]

# Each with what design.md's table says it loses, seeds 0 to 7, in percent and in its order of
# scenarios; None where it has no such row.
RIVALS: dict[str, tuple[Rule, tuple[float, ...] | None]] = {
    "equal": (lambda _: Equal(), (76, 287, 113, 139, 58, 136, 120, 152)),
    "ema 0.1": (_told(lambda a: Foreseen(Ema(0.1), a)), (0.3, 8.5, 17, 43, 0.7, 14, 6.4, 55)),
    "ema 0.3": (_told(lambda a: Foreseen(Ema(0.3), a)), (0.4, 3.4, 9.5, 23, 1.0, 4.0, 2.9, 28)),
    "last": (_told(lambda a: Foreseen(Ema(1.0), a)), (1.2, 2.2, 6.3, 9.4, 1.9, 1.7, 2.0, 11)),
    "dynamic batching": (
        lambda _: DynamicBatching(),
        (0.8, 2.3, 6.4, 12, 1.5, 3.0, 2.2, 14),
    ),
    "lb-bsp +-5, window 5": (
        lambda _: LbBsp2020(delta=5, window=5),
        (5.0, 66, 34, 73, 4.5, 46, 25, 68),
    ),
    "lbb": (_told(lambda a: Lbb(a)), (0.5, 2.4, 13, 30, 2.5, 7.0, 1.8, 42)),
}
AUTO: Rule = lambda _: Auto()  # noqa: E731
