"""From a profile to what a run begins with, as if it had measured that in its own steps."""

from __future__ import annotations

import numpy as np

from ..._planner import Job, Learnt
from ..._types import Cluster
from ...prediction._affine_filter import AffineFilter
from ...solve._allocate import allocate
from ...timemodels import AbstractTimeModel, ClusterProfile
from ...timemodels._affine import AffineTime
from ...timemodels._memory_model import MemoryModel, MemoryState

_NOISE = 0.02  # of a step, relative: a policy should not take workers for exact
_ROUNDS = 4


def learnt_from(profile: ClusterProfile, job: Job, *, state_bytes: int) -> Learnt:
    """Return what a planner restores, so that any policy begins with the split by the profile.

    Times are the lines that touch the fitted curves at the fastest split: those tell how much
    moving a few samples brings.

    Args:
        profile: of as many workers as the job has.
        job: what is planned for.
        state_bytes: what the optimizer will hold on top of the peaks, from its first step on.
    """
    cluster, times = job.cluster(job.caps()), profile.best_fit().times
    by_count = job.bounds.vary == "count"
    return {
        "policy": "",  # no state: the policy is shown steps of these times
        "policy_state": None,
        "global_batch_size": job.global_batch_size,
        "batch_size": allocate(times, cluster),
        "times": _steps_shown(times, cluster),
        # With forwards of one size, peaks say nothing about another.
        "memory": MemoryModel().init(job.world_size) if by_count else _peaks(profile, state_bytes),
    }


def _steps_shown(times: AbstractTimeModel, cluster: Cluster) -> dict[str, object]:
    best = np.maximum(allocate(times, cluster), 1)
    low, high = np.maximum(best * 3 // 4, 1), best + np.maximum(best // 4, 1)
    best_s = np.maximum(times.seconds(best), 1e-9)
    steepest = best_s / best
    slope = (times.seconds(high) - times.seconds(low)) / (high - low)
    slope = np.clip(slope, 1e-3 * steepest, steepest)
    line = AffineTime(np.maximum(best_s - slope * best, 0.0), slope)

    followed = AffineFilter()
    state = followed.init(len(best))
    for sizes in (low, high, best) * _ROUNDS:
        for sign in (1, -1):
            state = followed.update(state, sizes, line.seconds(sizes) * (1 + sign * _NOISE))
    return state


def _peaks(profile: ClusterProfile, state_bytes: int) -> MemoryState:
    model = MemoryModel()
    state, failed = model.init(profile.world_size), profile.out_of_memory
    # Where memory is not read, all that is known is what fitted and what did not: as room for
    # one unit, which the former takes and the latter exceeds.
    blind = (profile.capacity_bytes == 0) & (failed > 0)
    capacity = np.where(blind, 1, profile.capacity_bytes)
    sizes, peaks = profile.sizes, profile.peak_bytes
    for size, peak in zip(sizes, peaks, strict=True):
        needed = np.where(peak > 0, peak + state_bytes, 0)
        state = model.update(state, np.where(peak > 0, size, 0), needed, capacity)
    largest = np.array([each.sizes[-1] for each in profile.profiles])
    state = model.update(state, np.where(blind, largest, 0), np.where(blind, 1, 0), capacity)
    return model.update(state, failed, np.where(failed > 0, capacity + 1, 0), capacity)
