"""Where a step's time went, what else was noticed in it, and what causes of waiting there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NamedTuple, final

import numpy as np

from .._types import FloatArray
from ..events import StepsAccounted


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


class LinkClues(NamedTuple):
    """What one end of a TCP connection sent between two looks, by the kernel's account of it.

    Attributes:
        here, there: address and port of its two ends, ``"10.0.0.1:4711"``.
        acked_bytes: that the other end has received.
        busy_us: microseconds for which something was on its way, or waited to be sent.
        reader_us: of those, for which the other end took nothing more.
        num_segments: that were sent, again or for the first time.
        num_resent: that were sent again.
    """

    here: str
    there: str
    acked_bytes: int
    busy_us: int
    reader_us: int
    num_segments: int
    num_resent: int


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
        links: of connections to other hosts that carried something, since their look before.
    """

    step: int
    lasted_s: float
    cpu_s: float = 0.0
    throttled_s: float = 0.0
    run_delay_s: float = 0.0
    major_faults: int = 0
    alloc_retries: int = 0
    links: tuple[LinkClues, ...] = ()


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


class Cause(StrEnum):
    """Why ranks wait."""

    SLOW_WORKER = "slow worker"
    """A device or a CPU that is slower throughout; a CPU quota is said as evidence."""
    THROTTLING = "throttling"
    """It gets slower with time."""
    CONTENTION = "contention"
    """It is slower at times: others use the machine as well."""
    SLOW_BACKWARD = "slow backward"
    """Slower in the backward alone."""
    INPUT = "input"
    NETWORK = "network"
    """All wait together; for one rank's link where TCP's counters show it."""
    GARBAGE_COLLECTION = "garbage collection"
    CHECKPOINT = "checkpoint"
    """One rank saves while the others wait."""
    LOGGING = "logging"
    """Or whatever else the loop does on one rank alone."""
    LENGTHS = "lengths of samples"
    """The rank that draws the longest samples is another one in every step."""
    ROTATING = "rotating"
    """The slowest rank changes from step to step, and nothing that is measured says why."""
    COMPILATION = "compilation"
    MEMORY = "memory pressure"


_MOST_OPEN = 1024  # steps: ranks hold their reports back for a moment, and a device may be late


class Phase(IntEnum):
    """What a rank's time goes to in a step. In those that end with all ranks, it meets others.

    The order is that of a report, and cannot change without the protocol.
    """

    INPUT = 0
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3
    EVALUATION = 4
    CHECKPOINT = 5
    REST = 6
    REDUCTION = 7
    """After the own backward: the exchange of gradients, as far as it is exposed."""
    MEETING = 8
    """Collectives between hand-out and backward: DDP's buffers, counts of units, the user's."""
    MEAN = 9
    """``Balancer.mean`` and its kin."""
    PLAN = 10
    """The plan point."""


_FIRST_MET = Phase.REDUCTION


def time_by_phase(lasted_s: Sequence[float], phases: Sequence[Phase]) -> tuple[int, ...]:
    """Return how long each phase lasted, in microseconds: they add up to the step.

    Args:
        lasted_s: from each mark to the next in seconds, at least 0.
        phases: which phase that was.
    """
    spent_s = [0.0] * len(Phase)
    for phase, seconds in zip(phases, lasted_s, strict=True):
        spent_s[phase] += seconds
    return tuple([round(seconds * 1e6) if seconds else 0 for seconds in spent_s])


def accounted(steps: Sequence[int], spent_us: Sequence[Sequence[Sequence[int]]]) -> StepsAccounted:
    r"""Return where the time of all ranks went.

    Who comes last to a meeting waits for none: in each step and kind of meeting, the shortest time
    of any rank is communication, $c = \min_r m_r$, and the rest of a rank's time is waiting,
    $m_r - c$. Ranks' clocks are compared with nothing. Right where ranks leave a meeting together,
    as an all-reduce has them do. Where meetings of one kind in one step have different last ranks,
    some waiting counts as communication.

    Args:
        steps: their numbers, in order; at least one.
        spent_us: times by step, rank and phase, as ``time_by_phase`` gives them.
    """
    spent = np.array(spent_us, np.int64)
    met = spent[:, :, _FIRST_MET:]
    exchange = np.broadcast_to(met.min(axis=1, keepdims=True), met.shape).sum(axis=(0, 2))
    own = spent.sum(axis=0)

    def seconds(us: np.ndarray) -> tuple[float, ...]:
        return tuple((us / 1e6).tolist())

    return StepsAccounted(
        step=steps[-1],
        num_steps=len(steps),
        wall_s=seconds(own.sum(axis=1)),
        input_s=seconds(own[:, Phase.INPUT]),
        forward_s=seconds(own[:, Phase.FORWARD]),
        backward_s=seconds(own[:, Phase.BACKWARD]),
        communication_s=seconds(exchange),
        waiting_s=seconds(met.sum(axis=(0, 2)) - exchange),
        optimizer_s=seconds(own[:, Phase.OPTIMIZER]),
        evaluation_s=seconds(own[:, Phase.EVALUATION]),
        checkpoint_s=seconds(own[:, Phase.CHECKPOINT]),
        rest_s=seconds(own[:, Phase.REST]),
    )


@final
class StepAccounts:
    """Gathers what all ranks say of their steps, until there is enough of it for an event.

    Short steps are reported several together. A step that some rank does not report is left out.

    Args:
        world_size: number of workers.
        least_s: seconds of rank 0 in one event, at least.
    """

    def __init__(self, world_size: int, *, least_s: float = 0.1) -> None:
        self._world_size = world_size
        self._least_us = least_s * 1e6
        self._open: dict[int, dict[int, Sequence[int]]] = {}
        self._whole: list[tuple[int, dict[int, Sequence[int]]]] = []
        self._lasted_us = 0

    def add(self, rank: int, step: int, spent_us: Sequence[int]) -> bool:
        """Take in one rank's times of a step; return whether there is enough for an event."""
        known = self._open.setdefault(step, {})
        known[rank] = spent_us
        if len(known) == self._world_size:
            self._whole.append((step, self._open.pop(step)))
            self._lasted_us += sum(known[0])
        elif len(self._open) > _MOST_OPEN:
            del self._open[next(iter(self._open))]
        return self._lasted_us >= self._least_us

    def take(self) -> list[tuple[int, list[Sequence[int]]]]:
        """Return all steps that are complete, with the times of all ranks."""
        whole, self._whole, self._lasted_us = self._whole, [], 0
        ranks = range(self._world_size)
        return [(step, [known[rank] for rank in ranks]) for step, known in whole]
