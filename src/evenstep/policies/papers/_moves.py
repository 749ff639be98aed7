"""Moving samples from the slowest worker to the fastest, a few at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..._types import Cluster, FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Pair:
    """Who gives and who takes, and how much can go.

    Attributes:
        straggler: rank with the longest time; of equals the highest, as ties are the lower's.
        leader: rank with the shortest time among those with room; of equals the lowest.
        room: most samples that bounds let the pair exchange, whole granules of both.
        granule: smallest number of samples the pair can exchange.
    """

    straggler: int
    leader: int
    room: int
    granule: int

    def amount(self, wanted: int) -> int:
        """Return ``wanted`` in whole granules, one at least, as far as there is room."""
        return min(max(wanted // self.granule, 1) * self.granule, self.room)


def find_pair(batch_size: IntArray, step_s: FloatArray, *, cluster: Cluster) -> Pair:
    """Return the slowest worker and the fastest that can take more.

    Args:
        batch_size: samples each worker has, feasible, ``(world_size,)``.
        step_s: seconds each needs for them, 0 where there are none, ``(world_size,)``.
        cluster: bounds and granularity. Granules both workers know keep every split valid.
    """
    last = len(step_s) - 1
    straggler = last - int(np.argmax(step_s[::-1]))
    granules = cluster.granularity
    room = cluster.max_batch_size - batch_size
    leader = int(np.argmin(np.where(room >= granules, step_s, np.inf)))
    granule = math.lcm(int(granules[straggler]), int(granules[leader]))
    spare = int(min(batch_size[straggler] - cluster.min_batch_size[straggler], room[leader]))
    return Pair(straggler, leader, max(spare, 0) // granule * granule, granule)


def moved(batch_size: IntArray, pair: Pair, amount: int) -> IntArray:
    """Return the split after the straggler gave ``amount`` samples to the leader."""
    result = batch_size.copy()
    result[pair.straggler] -= amount
    result[pair.leader] += amount
    return result


def overshoots(step_s: FloatArray, cost_s: FloatArray, pair: Pair, amount: int) -> bool:
    """Say whether the leader would end no faster than the straggler was, so nothing is gained.

    Args:
        step_s: seconds each worker needs now, ``(world_size,)``.
        cost_s: seconds each adds for one more sample, ``(world_size,)``.
        pair: who gives and who takes.
        amount: samples that would go.
    """
    slowest = step_s[pair.straggler]
    return bool(step_s[pair.leader] + amount * cost_s[pair.leader] >= slowest * (1 - 1e-9))


def spread(step_s: FloatArray, batch_size: IntArray) -> float:
    """Return (max - min) / mean of the times of the workers that had samples."""
    ran = step_s[batch_size > 0]
    return float((ran.max() - ran.min()) / ran.mean())
