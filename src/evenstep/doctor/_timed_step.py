"""One rank's steps at two sizes in turn, for a bounded time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch

from .._doctor import CgroupLimits, Pace
from ._reference_step import Step

BUDGET_S = 4.0
BLOCK_S = 0.2
"""Short steps are timed several in a row: a CPU quota stops a process for up to 0.1 s, and most
steps would not notice."""
MOST_STEPS = 200


def sizes_for(global_batch_size: int, world_size: int) -> tuple[int, int]:
    """Return the sizes that are timed: a quarter of an equal share, and all of it."""
    share = max(2, global_batch_size // world_size)
    return max(1, share // 4), share


def time_steps(
    rank: int,
    load: Callable[[], Step],
    sizes: Sequence[int],
    limits: CgroupLimits,
    *,
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.perf_counter,
) -> Pace:
    """Return what steps took, each size in turn after some of each to warm up.

    There is one measurement of each size at least, however long it takes. An error of the step
    ends it, and is told beside what was timed before.

    Args:
        rank: the own one.
        load: returns the step.
        sizes: samples of a step.
        limits: of the process's control groups.
        budget_s: none begins after it.
        clock: in seconds.
    """
    taken: list[float] = []
    before = _look(limits, clock)
    error = ""
    try:
        step = load()
        block_s = min(BLOCK_S, budget_s / 10)
        repeats = [_repeats(step, size, clock, block_s) for size in sizes]
        before = _look(limits, clock)
        until_s = before[0] + budget_s
        while len(taken) < len(sizes) or (clock() < until_s and len(taken) < MOST_STEPS):
            at = len(taken) % len(sizes)
            taken.append(_timed(step, sizes[at], repeats[at], clock))
    except (Exception, SystemExit) as raised:  # the user's own code may raise anything
        error = f"{type(raised).__name__}: {raised}".splitlines()[0][:300]
    used = tuple(sizes[at % len(sizes)] for at in range(len(taken)))
    after = _look(limits, clock)
    lasted_s, held_s, used_s = (new - old for new, old in zip(after, before, strict=True))
    # Held back on several CPUs at once counts several times, as does the time used there.
    share = held_s / max(lasted_s, held_s + used_s, 1e-9)
    return Pace(rank, used, tuple(taken), min(max(share, 0.0), 1.0), error)


def _look(limits: CgroupLimits, clock: Callable[[], float]) -> tuple[float, float, float]:
    """Return the time, how long the quota held back so far, and the CPU time used so far."""
    return clock(), limits.throttled_s(), limits.used_s()


def _repeats(step: Step, size: int, clock: Callable[[], float], block_s: float) -> int:
    """Return how many steps take ``block_s``, after one to warm up."""
    _timed(step, size, 1, clock)
    return max(1, math.ceil(block_s / _timed(step, size, 1, clock)))


def _timed(step: Step, size: int, repeats: int, clock: Callable[[], float]) -> float:
    """Return the seconds of one step, in the mean over some in a row."""
    began_s = clock()
    for _ in range(repeats):
        step(size)
    _finish()
    return max((clock() - began_s) / repeats, 1e-9)


def _finish() -> None:
    """Wait for what was launched on a device."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
