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
