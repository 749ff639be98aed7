"""What a rank reads beside its times: clues of why ranks wait, and the CPU and memory it can have.

NARX predicts by the latter.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any, Protocol, final

import psutil  # type: ignore[import-untyped]

from .._diagnosis import HostClues, StepClues
from .._exchange._internal import log_fault
from .._host import Cgroups, HostReader, available_bytes, contents, thread_times_s
from .._planner import blaming
from ..policies._by_name import reads_resources

_LEAST_S = 2e-4  # of collecting or compiling: less of it waits, and is reported with the next
_EVERY_S = 1.0  # from one look at the process and its machine to the next
_MOST_UNTOLD = 128  # steps whose report is held, or whose device is not through yet
_CONTINUES = "Training and balancing continue; causes of waiting are found by times alone."


class SecondsClock(Protocol):
    """Counts the time of something.

    Attributes:
        total_s: seconds so far.
    """

    total_s: float


@final
class ClueReader:
    """Makes clues of what was noted in steps, and reads the system's files once a second.

    A step is reported if it had garbage collection, compilation or samples of another length. The
    length is the size of its inputs less what as many samples of this rank have in the mean, so a
    larger batch is not a longer one. Where samples are assigned by cost, a rank has fewer of them
    the longer they are. Then it is the size less this rank's mean.

    The thread that trains notes what its step had; whatever thread makes the reports calls this.
    Any fault of its own is logged and ends the reading. Training continues.

    Args:
        garbage: counts the time in the collector.
        compiling: counts the time of compiling.
        alloc_retries: how often the allocator gave back memory to find some, so far.
        by_cost: whether samples are assigned by cost.
        host: makes what reads the process and its machine.
        now: a monotonic clock in seconds.

    Attributes:
        garbage, compiling: as given.
    """

    def __init__(
        self,
        garbage: SecondsClock,
        compiling: SecondsClock,
        *,
        alloc_retries: Callable[[], int] = lambda: 0,
        by_cost: bool = False,
        host: Callable[..., HostReader] = HostReader,
        now: Callable[[], float] = monotonic,
    ) -> None:
        self.garbage, self.compiling = garbage, compiling
        self._alloc_retries = alloc_retries
        self._by_cost = by_cost
        self._open_host = host
        self._now = now
        self._host: HostReader | None = None
        self._look_s = 0.0
        self._is_on = True
        self._step = -1  # the one under way
        self._gc_s, self._compile_s = garbage.total_s, compiling.total_s  # as last reported
        self._size = self._num_samples = 0  # of the step under way
        self._whole_size = self._whole_number = 0  # of all before it
        self._known: dict[int, StepClues] = {}
        self._looks: deque[HostClues] = deque(maxlen=_MOST_UNTOLD)

    def close(self) -> None:
        """Read no more."""
        self._is_on = False

    def begin_step(self, step: int, gc_s: float, compile_s: float, thread_id: int) -> None:
        """Take in that a step begins, and with it the end of the one before.

        Args:
            step: its number.
            gc_s, compile_s: what both clocks showed then.
            thread_id: the system's number of the thread that trains.
        """
        if self._is_on:
            try:
                self._end_step(gc_s, compile_s)
                self._step = step
                if self._now() >= self._look_s:
                    self._look(thread_id)
            except Exception as error:
                log_fault(self._step, error, _CONTINUES)
                self.close()

    def saw_inputs(self, num_samples: int, size: int) -> None:
        """Take in what a forward of the step was given."""
        self._num_samples += num_samples
        self._size += size

    def take(self, step: int) -> tuple[StepClues | None, HostClues | None]:
        """Return what there is to say with the times of ``step``, which is over; once."""
        return self._known.pop(step, None), self._looks.popleft() if self._looks else None

    def _end_step(self, gc_s: float, compile_s: float) -> None:
        """Keep what was noticed in the step under way."""
        gc_us = compile_us = 0
        if gc_s + compile_s >= self._gc_s + self._compile_s + _LEAST_S:
            gc_us = round((gc_s - self._gc_s) * 1e6)
            compile_us = round((compile_s - self._compile_s) * 1e6)
            self._gc_s, self._compile_s = gc_s, compile_s
        size, num_samples, self._size, self._num_samples = self._size, self._num_samples, 0, 0
        length = self._length(size, num_samples) if size else 0
        if (gc_us or compile_us or length) and self._step >= 0:
            self._known[self._step] = StepClues(gc_us=gc_us, compile_us=compile_us, size=length)
            if len(self._known) > _MOST_UNTOLD:
                self._known.pop(next(iter(self._known)), None)  # another thread may take it

    def _length(self, size: int, num_samples: int) -> int:
        """Return what the step's inputs have above the mean; 0 where all samples are alike."""
        number = 1 if self._by_cost else num_samples
        self._whole_size += size
        self._whole_number += number
        return size - self._whole_size * number // max(self._whole_number, 1)

    def _look(self, thread_id: int) -> None:
        """Look at the process and its machine; at first only to compare with later."""
        self._look_s = self._now() + _EVERY_S
        if self._host is None:
            self._host = self._open_host(thread_id=thread_id, alloc_retries=self._alloc_retries)
            return
        self._looks.append(self._host.read(self._step))


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0))


@final
class ProcessReader:
    r"""Reads what this process can have, from Linux's files.

    Of the $n_0$ CPUs that it could run on at first it can have the share

    $$\mathrm{cpu} = \min(q, n c) / n_0, \quad c = \frac{\mathrm{ran}}{\mathrm{ran} +
    \max(\mathrm{waited} - \mathrm{throttled}, 0)}.$$

    $q$ is the tightest quota among its control groups, in cores, and $n$ the number of CPUs it may
    run on. Both hold from now on. $c$ is what the neighbours left of the calling thread's time
    since the call before: it ran for a part of it, and waited for a core for another. What a quota
    held back counts as no wait, because $q$ has it. Where the system does not count a thread's
    waits, $c$ is the part of the time in which no process of the own group waited (pressure stall
    information), and 1 where there is none of that either.

    Memory is what the machine has available, or what the group's limit leaves if that is less.

    Right where a quota, the CPUs or the memory of this process change: the next call has it,
    before a step has run under it. $c$ is no more than the step's own speed says as well.
    Wrong where several busy processes share a quota: it counts whole for each. Where a hypervisor
    takes time away, or clocks and caches slow down: nothing here shows it. Where threads that
    compute are many and the calling one only waits for them: $c$ is its own.

    A call takes less than 0.2 ms, and nothing is read before the first one.

    Args:
        root: of the file system, where ``proc`` and ``sys`` lie.
        num_cpus: returns how many CPUs this process may run on.
        thread_id: returns the system's number of the calling thread.
        now: a monotonic clock in seconds.
    """

    def __init__(
        self,
        *,
        root: Path = Path("/"),
        num_cpus: Callable[[], int] = _num_cpus,
        thread_id: Callable[[], int] = threading.get_native_id,
        now: Callable[[], float] = monotonic,
    ) -> None:
        self._root = root
        self._num_cpus, self._thread_id, self._now = num_cpus, thread_id, now
        self._num_at_first = 0
        self._membership: bytes | None = None
        self._groups = Cgroups()
        self._before = 0, 0.0, 0.0, 0.0

    def read(self) -> tuple[float, int]:
        """Return the share of its CPUs that this process can have, in [0, 1], and free bytes."""
        membership = contents(self._root / "proc/self/cgroup")
        if membership != self._membership:  # it may be moved to other groups at any time
            self._membership, self._groups = membership, Cgroups.find(self._root)
        number = self._num_cpus()
        self._num_at_first = self._num_at_first or number
        cores = number * self._left_by_neighbours()
        if (quota := self._groups.quota()) is not None:
            cores = min(cores, quota[0])
        left = available_bytes(self._root), self._groups.free_bytes()
        free = min((size for size in left if size is not None), default=0)
        return min(cores / self._num_at_first, 1.0), free

    def _left_by_neighbours(self) -> float:
        """Return the part of the time since the call before in which no neighbour was first."""
        thread_before, ran_before_s, waited_before_s, throttled_before_s = self._before
        self._before = thread, ran_s, waited_s, throttled_s = self._look()
        if thread == thread_before:
            ran_s, waited_s = ran_s - ran_before_s, waited_s - waited_before_s
        waited_s = max(waited_s - (throttled_s - throttled_before_s), 0.0)
        return min(max(ran_s, 0.0) / (ran_s + waited_s), 1.0) if ran_s > 0 else 1.0

    def _look(self) -> tuple[int, float, float, float]:
        """Return of which thread, and for how long it has run, waited and been held back.

        Where a thread's waits are not counted, its group's pressure stands for them.
        """
        now_s, thread_id = self._now(), self._thread_id()
        throttled_s = sum(self._groups.throttled_s())
        ran_s, waited_s = thread_times_s(self._root, thread_id)
        if ran_s:
            return thread_id, ran_s, waited_s, throttled_s
        waited_s = self._groups.waited_s() or 0.0
        return 0, now_s - waited_s, waited_s, throttled_s


class MachineReader(Protocol):
    """Reads the CPU and memory that one worker can have. Any object with this method will do."""

    def read(self) -> tuple[float, int] | None:
        """Return the share of the CPUs that the worker can have, in [0, 1], and free bytes.

        It is called when the worker's own part of a step is done, on the thread that did it. This
        is the latest moment at which the next step's plan can still use the reading. None means
        that it is unknown.
        """


class PsutilReader:
    """Reads the whole host by psutil, on systems without Linux's files.

    The share is that of idle cores since the last call. A busy worker counts as load, and limits
    of this process alone are not seen. A call takes about 0.05 ms.
    """

    def __init__(self) -> None:
        psutil.cpu_percent(interval=None)  # the first call has nothing to compare with

    def read(self) -> tuple[float, int]:
        """Return the idle share of all cores since the last call, and the available memory."""
        busy = psutil.cpu_percent(interval=None) / 100
        return min(max(1 - busy, 0.0), 1.0), int(psutil.virtual_memory().available)


def machine_reader_of(
    policy: Any, given: MachineReader | None = None, *, root: Path = Path("/")
) -> MachineReader | None:
    """Return what reads the machine, if ``policy`` asks; None if it does not.

    That is the given reader, or what reads this process where the system has files for that, or
    else the whole host's.

    Args:
        policy: whose predictor may ask.
        given: the user's own reader.
        root: of the file system, where ``proc`` would lie.
    """
    if not reads_resources(policy):
        return None
    if given is not None:
        return given
    return ProcessReader(root=root) if (root / "proc/self/cgroup").exists() else PsutilReader()


def read_by(reader: MachineReader) -> tuple[float, int] | None:
    """Return what ``reader`` says, in Python's own numbers: messages carry no others.

    Raises:
        UserMistake: a user's reader failed, or said something else.
    """
    with blaming(reader):
        found = reader.read()
        return None if found is None else (float(found[0]), int(found[1]))
