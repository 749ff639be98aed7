"""The same batch size for every worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from .._types import Cluster, Decision, StepTimings
from ._base import READING_S, AbstractPolicy
from ._splits import equal_split


@final
@dataclass(frozen=True, slots=True)
class Equal(AbstractPolicy[None]):
    r"""Every worker gets the same batch, whatever it measures.

    $b_r = B / W$, what plain data-parallel training does. A step takes
    $\max_r t_r(B / W)$: right where all workers are alike, and the baseline that every other
    policy has to beat. Bounds that keep a worker from its share leave the others the rest, in
    equal parts; a remainder goes to the lower ranks.
    """

    name: ClassVar[str] = "equal"

    @property
    def reading_s(self) -> float:
        return READING_S

    def init(self, cluster: Cluster) -> Decision[None]:
        return Decision(equal_split(cluster), None, "equal: the same batch for every worker", 1.0)

    def update(self, cluster: Cluster, timings: StepTimings, state: None) -> Decision[None]:
        return self.init(cluster)
