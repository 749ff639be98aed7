"""What one rank's process notices beside the times of its steps."""

from __future__ import annotations

from dataclasses import dataclass


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
