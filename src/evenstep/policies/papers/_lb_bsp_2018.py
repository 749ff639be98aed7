"""Speeds foreseen before every step, or a profile solved exactly, after Chen et al."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import numpy as np

from ..._types import Cluster, Decision, FloatArray, StepTimings
from ...exceptions import invalid
from ...prediction import AbstractPredictor, Narx
from ...solve._allocate import allocate
from ...solve._apportion import apportion
from ...timemodels import AbstractTimeModel
from .._base import AbstractPolicy, equal_split, with_floor


@final
@dataclass(frozen=True, slots=True)
class LbBsp2018(AbstractPolicy[dict[str, Any]]):
    r"""Batch sizes in proportion to foreseen speeds; where a profile is given, solved from it.

    The rule for CPUs, whose speeds $v_r = b_r / t_r$ in samples/s follow what other jobs leave
    free: foresee every worker's speed of the next step, $\hat v_r$, and

    $b_r = B \, \hat v_r / \sum_q \hat v_q$, rounded by largest remainder within the bounds.

    The rule for GPUs, whose speeds are their own but not proportional: with the profile
    $T_r(b)$, flat below saturation and a line past it, $\min_b \max_r T_r(b_r)$, exactly and for
    the whole run. Times measured later are not looked at.

    The first is right where steps are long against their fixed costs and the load moves from step
    to step, as far as the predictor can foresee it: resources given in ``StepTimings`` let
    ``Narx`` see a change in the step it happens in. Wrong where fixed costs matter: speeds then
    fall with the batch, and sizes settle only after several steps, some percent from the best.
    It moves a few samples at every step. The second is right for as long as the profile is.

    Left out, as a mistake of the authors' code: gradients weighted by the initial batch, which
    rescales the learning rate as sizes drift.

    Chosen here, as the paper's text was not recovered: the predictor's make (see ``Narx``),
    rounding, and a smallest batch of one granule, because a worker without samples is not
    measured. One never measured counts as fast as the mean of the others. The short last step of
    an epoch is left out: fixed costs make all workers look slow there, and some more than others.
    The paper solves the profile by bisection, for a piecewise linear curve; ``allocate`` takes any.

    Args:
        predictor: foresees speeds in samples/s. Not used where there is a profile.
        profile: the time of every worker at any size, such as an ``AffineTime`` or a
            ``TableTime``. None is the rule for CPUs.

    Raises:
        ValueError: ``profile`` speaks of another number of workers than the cluster has.

    References:
        C. Chen et al., "Fast distributed deep learning via worker-adaptive batch sizing", arXiv
        1806.02508v1, 2018: the rules for CPU and for GPU clusters.
    """

    name: ClassVar[str] = "lb-bsp-2018"

    predictor: AbstractPredictor[Any] = field(default_factory=Narx)
    profile: AbstractTimeModel | None = None

    def init(self, cluster: Cluster) -> Decision[dict[str, Any]]:
        if self.profile is not None:
            return self._solved(cluster, self.profile)
        state = {"predictor": self.predictor.init(cluster.world_size)}
        return Decision(equal_split(cluster), state, "equal: nothing measured yet")

    def update(
        self, cluster: Cluster, timings: StepTimings, state: dict[str, Any]
    ) -> Decision[dict[str, Any]]:
        if self.profile is not None:
            return self._solved(cluster, self.profile)
        foreseen = state["predictor"]
        if timings.batch_size.sum() == cluster.global_batch_size:
            foreseen = self.predictor.update(foreseen, _speeds(timings), timings.resources)
        speed = self.predictor.predict(foreseen)
        known = ~np.isnan(speed)
        if not known.any():
            return Decision(equal_split(cluster), state, "equal: waiting for a whole step")
        speed = np.where(known, speed, speed[known].mean())
        slow = int(np.argmin(speed))
        reason = f"by {self.predictor.name}: rank {slow} slowest at {speed[slow]:.3g} samples/s"
        return Decision(apportion(speed, with_floor(cluster)), {"predictor": foreseen}, reason)

    def _solved(self, cluster: Cluster, profile: AbstractTimeModel) -> Decision[dict[str, Any]]:
        if profile.world_size != cluster.world_size:
            raise invalid(
                "LbBsp2018(profile=...)",
                f"speak of the cluster's {cluster.world_size} workers",
                profile.world_size,
                "Give one curve per rank.",
            )
        best = allocate(profile, cluster)
        return Decision(best, {}, f"{profile.seconds(best).max():.3g} s by the profile")


def _speeds(timings: StepTimings) -> FloatArray:
    """Return samples/s, NaN for a worker that had no samples."""
    speeds = np.full(len(timings.batch_size), np.nan)
    ran = timings.batch_size > 0
    np.divide(timings.batch_size, timings.compute_s, out=speeds, where=ran)
    return speeds
