"""What a process can have of its machine: CPU by quotas, affinity and neighbours, and memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import NamedTuple, final

from ._cgroups import Cgroups
from ._kernel_files import available_bytes, contents, thread_times_s


class _Look(NamedTuple):
    """What was counted so far, when it was looked at."""

    now_s: float = 0.0
    thread_id: int = 0
    ran_s: float = 0.0
    waited_s: float = 0.0  # of the thread, or of its group's pressure
    throttled_s: float = 0.0


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
        self._before = _Look()

    def read(self) -> tuple[float, int]:
        """Return the share of its CPUs that this process can have, in [0, 1], and free bytes."""
        membership = contents(self._root / "proc/self/cgroup")
        if membership != self._membership:  # it may be moved to other groups at any time
            self._membership, self._groups = membership, Cgroups.find(self._root)
        number = self._num_cpus()
        self._num_at_first = self._num_at_first or number
        cores = number * self._left_by_neighbours()
        if (quota := self._groups.quota()) is not None:
            cores = min(cores, quota.cores)
        left = available_bytes(self._root), self._groups.free_bytes()
        free = min((size for size in left if size is not None), default=0)
        return min(cores / self._num_at_first, 1.0), free

    def _left_by_neighbours(self) -> float:
        """Return the part of the time since the call before in which no neighbour was first."""
        before, after = self._before, self._look()
        self._before = after
        ran_s, waited_s = after.ran_s, after.waited_s
        if after.thread_id == before.thread_id:
            ran_s, waited_s = ran_s - before.ran_s, waited_s - before.waited_s
        waited_s = max(waited_s - (after.throttled_s - before.throttled_s), 0.0)
        return min(max(ran_s, 0.0) / (ran_s + waited_s), 1.0) if ran_s > 0 else 1.0

    def _look(self) -> _Look:
        now_s, thread_id = self._now(), self._thread_id()
        throttled_s = sum(self._groups.throttled_s())
        ran_s, waited_s = thread_times_s(self._root, thread_id)
        if ran_s:
            return _Look(now_s, thread_id, ran_s, waited_s, throttled_s)
        waited = self._groups.waited_s()
        return _Look(now_s, 0, now_s - (waited or 0.0), waited or 0.0, throttled_s)
