"""What ranks' processes and machines notice beside the times of steps, as parts of the time too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np

from .._types import FloatArray


@dataclass(frozen=True, slots=True)
class StepClues:
    """Of one rank in one step.

    Attributes:
        gc_us: microseconds in Python's garbage collector, on any thread of the process.
        compile_us: microseconds of compiling, by ``torch.compile`` for example.
        size: numbers or tokens in the inputs of its forwards, whatever the loop hands to them;
            0 where that is not known.
    """

    gc_us: int = 0
    compile_us: int = 0
    size: int = 0


@dataclass(frozen=True, slots=True)
class HostClues:
    """Of one rank's process and machine, over a second or so.

    All are differences between two looks; those that a system does not offer are 0.

    Attributes:
        step: the step under way at the second look.
        lasted_s: seconds between the looks.
        cpu_s: CPU seconds of the process, all threads.
        throttled_s: seconds for which its CPU quota held it back (``cpu.stat`` of the cgroup).
        run_delay_s: seconds for which the thread that trains was ready to run and had no core.
        major_faults: pages that had to be read from a disk.
        alloc_retries: how often an accelerator's allocator gave back memory to find some.
    """

    step: int
    lasted_s: float
    cpu_s: float = 0.0
    throttled_s: float = 0.0
    run_delay_s: float = 0.0
    major_faults: int = 0
    alloc_retries: int = 0


class HostRates(NamedTuple):
    """All ``(world_size,)``; 0 where nothing is known.

    Attributes:
        quota: part of the time in which a CPU quota held the rank back.
        delay: part of the time in which its thread was ready and had no core.
        faults_per_s: pages read from a disk.
        retries: how often the allocator gave back memory to find some.
    """

    quota: FloatArray
    delay: FloatArray
    faults_per_s: FloatArray
    retries: FloatArray


@final
class Machines:
    """Sums up looks at processes and machines, over the newest seconds and the whole run.

    Args:
        world_size: number of ranks.
        window_s: how many seconds; between half of them and all are looked at.
    """

    def __init__(self, world_size: int, window_s: float) -> None:
        self._half_s = window_s / 2
        self._run, self._older, self._newer = np.zeros((3, 6, world_size))

    def add(self, rank: int, clues: HostClues) -> None:
        """Take in one look."""
        if self._newer[0, rank] >= self._half_s:
            self._older[:, rank] = self._newer[:, rank]
            self._newer[:, rank] = 0.0
        found = (
            clues.lasted_s,
            clues.cpu_s,
            clues.throttled_s,
            clues.run_delay_s,
            clues.major_faults,
            clues.alloc_retries,
        )
        self._newer[:, rank] += found
        self._run[:, rank] += found

    def rates(self, *, whole_run: bool) -> HostRates:
        """Return what was seen."""
        sums = self._run if whole_run else self._older + self._newer
        lasted_s = np.maximum(sums[0], 1e-9)
        # Held back on several CPUs at once counts several times, as does the time used there.
        quota = sums[2] / np.maximum(lasted_s, sums[1] + sums[2])
        delay, faults_per_s = sums[3:5] / lasted_s
        return HostRates(quota, delay, faults_per_s, retries=sums[5].copy())
