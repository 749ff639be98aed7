"""Batch sizes that stay: the same for every worker, or what the user chose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from .._types import Cluster, Decision, IntArray, StepTimings
from ..exceptions import invalid
from ._base import READING_S, AbstractPolicy, equal_split, is_feasible, refit


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
        given = np.asarray(self.batch_size)
        if given.ndim != 1 or given.dtype.kind not in "iu" or (given < 0).any():
            raise invalid(
                "Fixed(batch_size=...)",
                "be integers >= 0, one per rank",
                self.batch_size,
                "Give whole samples, such as (96, 32).",
            )
        # Past the frozen guard: a list or an array given is kept as what the field says.
        object.__setattr__(self, "batch_size", tuple(given.tolist()))

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
        if len(self.batch_size) != cluster.world_size:
            raise invalid(
                "Fixed(batch_size=...)",
                f"have {cluster.world_size} entries, one per rank",
                f"{len(self.batch_size)} of them",
                "Add or remove some.",
            )
        return np.array(self.batch_size, np.int64)
