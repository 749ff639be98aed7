"""What rules share that move samples from the slowest worker: the moves, and the split held."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..._types import Cluster, FloatArray, IntArray, StepTimings
from .._base import is_feasible, refit

PATIENCE = 2
"""Steps under other sizes that are waited out: a device may report one or two steps late."""


def see(
    state: dict[str, Any], *, cluster: Cluster, timings: StepTimings
) -> tuple[dict[str, Any], bool, bool]:
    """Take in a step beside the split that was decided last, as far as a rule can know it.

    Rules that correct the sizes they measured go wrong when a measurement comes from other
    sizes: a move would be made twice. Such steps are left out. After more than ``PATIENCE`` of
    them in a row those sizes are evidently kept on purpose, by a wrapper perhaps, and they count.

    Args:
        state: of the rule: in ``held`` the local batch sizes, ``(world_size,)``, in ``waited`` the
            full steps in a row that were measured under other sizes.
        cluster: the bounds, by which the sizes are made feasible.
        timings: of the step.

    Returns:
        The state with both as they are now; whether the sizes are other ones; and whether the step
        was computed with them.
    """
    fitted, waited = refit(state["held"], cluster), state["waited"]
    is_new = fitted is not state["held"]
    if np.array_equal(timings.batch_size, fitted):
        return {**state, "held": fitted, "waited": 0}, is_new, True
    if timings.batch_size.sum() != cluster.global_batch_size:  # the short last step of an epoch
        return {**state, "held": fitted}, is_new, False
    if waited < PATIENCE or not is_feasible(timings.batch_size, cluster):
        return {**state, "held": fitted, "waited": waited + 1}, is_new, False
    return {**state, "held": timings.batch_size.copy(), "waited": 0}, True, True


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
