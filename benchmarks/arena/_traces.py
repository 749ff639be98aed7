"""How much slower than alone every worker is, over time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evenstep.sim import read_trace

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Slowdowns that change at the ends of periods, the same for every contestant.

    After the last period the first one begins again.

    Attributes:
        period_s: length of each period, positive, ``(num_periods,)``.
        slowdown: a worker's time over its time alone, ``(num_periods, world_size)``.
    """

    period_s: FloatArray
    slowdown: FloatArray

    @property
    def changes(self) -> bool:
        """Whether some worker is slower at one time than at another."""
        return bool(np.ptp(self.slowdown, axis=0).any())

    def at(self, now_s: float) -> FloatArray:
        """Return every worker's slowdown at a time, ``(world_size,)``."""
        edges = np.cumsum(self.period_s)
        period = int(np.searchsorted(edges, now_s % edges[-1], side="right"))
        found: FloatArray = self.slowdown[min(period, len(edges) - 1)]
        return found

    def end_s(self, rank: int, begin_s: float, alone_s: float) -> float:
        """Return when work that takes ``alone_s`` by itself ends, begun at ``begin_s``."""
        edges = np.cumsum(self.period_s)
        rounds, within_s = divmod(begin_s, float(edges[-1]))
        period = min(int(np.searchsorted(edges, within_s, side="right")), len(edges) - 1)
        begin_s, left_s = rounds * float(edges[-1]), alone_s
        while True:
            slowdown = float(self.slowdown[period, rank])
            room_s = float(edges[period]) - within_s
            if left_s * slowdown <= room_s:
                return begin_s + within_s + left_s * slowdown
            left_s -= room_s / slowdown
            within_s, period = float(edges[period]), period + 1
            if period == len(edges):
                begin_s, within_s, period = begin_s + float(edges[-1]), 0.0, 0


def static(world_size: int) -> Trace:
    """Return workers that are always as fast as alone."""
    return Trace(np.ones(1), np.ones((1, world_size)))


def periodic(world_size: int, *, period_s: float, slowdown: float) -> Trace:
    """Return workers that are slowed in turn, one at a time, for ``period_s`` each."""
    return Trace(np.full(world_size, period_s), 1 + (slowdown - 1) * np.eye(world_size))


def recorded(path: Path, *, world_size: int, period_s: float) -> Trace:
    """Return workers slowed as those of a recording were, step by step, each ``period_s`` long.

    Seconds per sample are compared with the 2nd percentile of their worker. Where the recording
    has fewer workers, later parts of it stand for the others.
    """
    slope_s = read_trace(path).workload.slope_s
    slowdown = np.maximum(slope_s / np.quantile(slope_s, 0.02, axis=0), 1.0)
    parts = -(-world_size // slowdown.shape[1])
    length = len(slowdown) // parts
    beside = [slowdown[part * length : (part + 1) * length] for part in range(parts)]
    together = np.concatenate(beside, axis=1)[:, :world_size]
    return Trace(np.full(length, period_s), together)


def drawn(
    world_size: int,
    *,
    seed: int,
    length_s: float,
    stay_s: tuple[float, float],
    slowdown: tuple[float, float],
) -> Trace:
    """Return workers on whose devices other jobs come and go, drawn independently for each.

    Args:
        world_size: number of workers.
        seed: of the draws.
        length_s: seconds until the trace begins anew.
        stay_s: shortest and longest time between two changes of a worker.
        slowdown: least and greatest while another job is there. Without one it is 1.
    """
    draw = np.random.default_rng(seed)
    changes: list[list[float]] = []
    levels: list[list[float]] = []
    for _ in range(world_size):
        starts, factors, is_busy = [0.0], [1.0], bool(draw.integers(2))
        factors[0] = draw.uniform(*slowdown) if is_busy else 1.0
        while (start := starts[-1] + draw.uniform(*stay_s)) < length_s:
            is_busy = not is_busy
            starts.append(start)
            factors.append(draw.uniform(*slowdown) if is_busy else 1.0)
        changes.append(starts)
        levels.append(factors)
    starts_s = np.unique(np.concatenate([np.array(each) for each in changes]))
    slow = [
        np.array(levels[k])[np.searchsorted(changes[k], starts_s, side="right") - 1]
        for k in range(world_size)
    ]
    return Trace(np.diff(np.append(starts_s, length_s)), np.stack(slow, axis=1))
