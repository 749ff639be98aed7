"""What a set-up of the arena is: curves, a trace, the batch, the target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.arena._traces import Trace
from evenstep import Cluster, allocate
from evenstep.policies import AbstractPolicy
from evenstep.timemodels import PiecewiseTime


@dataclass(frozen=True, slots=True, eq=False)
class ArenaSetUp:
    """Workers, what they train, and the paper whose evaluation it is.

    Attributes:
        name: as on the command line.
        rule: the paper's own policy, by name.
        times: of every worker alone, in seconds of the arena.
        trace: what slows them.
        exchange_s: seconds of an exchange of gradients or parameters, for all contestants alike.
        global_batch_size: samples of a step over all workers.
        learning_rate: of plain SGD at the global batch.
        target: accuracy that counts as trained.
        duration_s: seconds that each contestant trains.
        turn_s: seconds of a turn of exact contestants.
        num_learning: turns at the beginning that are no part of what is settled.
        tells_quota: whether readers of a machine know what it can have now, as with quotas. If not,
            they know what it had in the last step, as with waits for a core.
        rivals: policies that race beside the rule, by name.
        has_inexact: whether contestants race that do not make the updates of plain training.
    """

    name: str
    rule: str
    times: PiecewiseTime
    trace: Trace
    exchange_s: float
    global_batch_size: int
    learning_rate: float = 0.1
    target: float = 0.9
    duration_s: float = 24.0
    turn_s: float = 4.0
    num_learning: int = 1
    tells_quota: bool = False
    rivals: Mapping[str, AbstractPolicy[Any]] = field(default_factory=dict)
    has_inexact: bool = False

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self.times.world_size

    @property
    def equal(self) -> NDArray[np.int64]:
        """The equal split, ``(world_size,)``; the batch is divisible."""
        return np.full(self.world_size, self.global_batch_size // self.world_size)

    @property
    def speeds(self) -> NDArray[np.float64]:
        """Samples per second alone at the equal split, what a user measures once."""
        return self.equal / self.times.seconds(self.equal)

    def best(self, slowdown: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the fastest split for known slowdowns, ``(world_size,)``."""
        cluster = Cluster(self.world_size, self.global_batch_size)
        return allocate(self._slowed(slowdown), cluster)

    def step_s(
        self, batch_size: NDArray[np.int64], slowdown: NDArray[np.float64] | None = None
    ) -> float:
        """Return the seconds of a step with its exchange; by default of workers left alone."""
        times = self.times if slowdown is None else self._slowed(slowdown)
        return float(times.seconds(batch_size).max()) + self.exchange_s

    def mean_step_s(self, duration_s: float, *, equal: bool) -> float:
        """Return the mean step over the trace, of equal splits or of the best ones.

        The best split knows every worker's speed at the beginning of its step. A step that would
        end after ``duration_s`` counts by the part that fits.
        """
        now_s, num_steps = 0.0, 0.0
        while now_s < duration_s:
            sizes = self.equal if equal else self.best(self.trace.at(now_s))
            alone_s = self.times.seconds(sizes)
            ends = [self.trace.end_s(k, now_s, float(alone_s[k])) for k in range(self.world_size)]
            end_s = max(ends) + self.exchange_s
            num_steps += min(1.0, (duration_s - now_s) / (end_s - now_s))
            now_s = end_s
        return duration_s / num_steps

    def _slowed(self, slowdown: NDArray[np.float64]) -> PiecewiseTime:
        alone = self.times
        return PiecewiseTime(alone.flat_s * slowdown, alone.saturation, alone.slope_s * slowdown)
