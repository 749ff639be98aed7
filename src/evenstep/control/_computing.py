"""What is known of computing once a step is over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from .._types import Cluster, FloatArray, StepTimings
from ..timemodels import AffineTime


@final
@dataclass(frozen=True, slots=True, eq=False)
class Computing:
    """The workers' times, what bounds their sizes, and how the step went.

    Attributes:
        times: fixed cost and cost per sample, as fitted so far.
        cluster: the global batch and bounds.
        timings: of the step, as measured.
        wall_s: seconds of the step before it, all included; None if it was the first of a loop.
    """

    times: AffineTime
    cluster: Cluster
    timings: StepTimings
    wall_s: float | None

    @property
    def foreseen_s(self) -> FloatArray:
        """What the sizes of the step take by the fit, ``(world_size,)``."""
        return self.times.seconds(self.timings.batch_size)
