"""What workers do over a run, as a value."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from .._types import Cluster, FloatArray, IntArray
from ._workload import BoolArray, Workload


@dataclass(frozen=True, slots=True, eq=False)
class Scenario:
    """What workers do over a run, whatever is asked of them: drawn by name, or recorded.

    Attributes:
        name: of the scenario, or of the file it was read from.
        intercept_s: fixed cost of a step, ``(world_size,)``.
        slope_s: cost of a sample, ``(num_steps, world_size)``.
        jitter: factors on the whole, likewise.
        saturation: samples up to which any batch takes the same time, ``(world_size,)``; None is
            a straight line.
        max_batch_size: most samples that fit in memory, ``(world_size,)``; None is no cap.
        presence: who is there, ``(num_steps, world_size)``; None is all workers, always.
    """

    name: str
    intercept_s: FloatArray
    slope_s: FloatArray
    jitter: FloatArray
    saturation: IntArray | None = None
    max_batch_size: IntArray | None = None
    presence: BoolArray | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                value.flags.writeable = False

    @property
    def world_size(self) -> int:
        """Number of workers over the whole run."""
        return len(self.intercept_s)

    @property
    def num_steps(self) -> int:
        """Steps for which times are given."""
        return len(self.slope_s)

    @property
    def workload(self) -> Workload:
        """Its times and members, for ``run`` and ``oracle``."""
        return Workload(self.intercept_s, self.slope_s, self.jitter, self.saturation, self.presence)

    def cluster(self, global_batch_size: int) -> Cluster:
        """Return the cluster of its workers, within their caps.

        Raises:
            ValueError: the caps do not hold the global batch.
        """
        return Cluster(self.world_size, global_batch_size, max_batch_size=self.max_batch_size)
