"""What a process and its machine went through since the last look: clues of why ranks wait."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, final

from .._diagnosis import HostClues
from ._cgroups import Cgroups, thread_times_s, throttled_s
from ._connections import LinkReader


@final
class GarbageClock:
    """Counts the time in which garbage is collected, from ``open`` to ``close``.

    A collection holds Python's lock from its begin to its end, so that one mark is enough.

    Args:
        now: a monotonic clock in seconds.
        callbacks: what Python calls at the begin and the end of a collection.

    Attributes:
        total_s: seconds in collections so far.
    """

    def __init__(
        self,
        *,
        now: Callable[[], float] = perf_counter,
        callbacks: list[Any] = gc.callbacks,
    ) -> None:
        self._now, self._callbacks = now, callbacks
        self._begun_s: float | None = None
        self.total_s = 0.0

    def open(self) -> None:
        """Begin to count."""
        self._callbacks.append(self._collected)

    def close(self) -> None:
        """Count no more."""
        if self._collected in self._callbacks:
            self._callbacks.remove(self._collected)

    def _collected(self, phase: str, _: dict[str, Any]) -> None:
        if phase == "start":
            self._begun_s = self._now()
        elif self._begun_s is not None:
            self.total_s += self._now() - self._begun_s
            self._begun_s = None


def _major_faults() -> int:
    try:
        import resource
    except ModuleNotFoundError:  # not on Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


class _Look(NamedTuple):
    now_s: float
    cpu_s: float
    throttled_s: tuple[float, ...]
    run_delay_s: float
    major_faults: int
    alloc_retries: int


@final
class HostReader:
    """Reads what the system counts of this process, every few seconds or so.

    About 0.1 ms a look, and every few seconds some more for its connections. What the system does
    not offer stays 0: all but CPU seconds and page faults are Linux's.

    Args:
        root: of the file system, where ``proc`` and ``sys`` lie.
        thread_id: the system's number of the thread that trains.
        now: a monotonic clock in seconds.
        cpu_s: CPU seconds of this process so far.
        major_faults: pages it had to read from a disk so far.
        alloc_retries: how often an accelerator's allocator gave back memory to find some, so far.
    """

    def __init__(
        self,
        *,
        root: Path = Path("/"),
        thread_id: int | None = None,
        now: Callable[[], float] = time.monotonic,
        cpu_s: Callable[[], float] = time.process_time,
        major_faults: Callable[[], int] = _major_faults,
        alloc_retries: Callable[[], int] = lambda: 0,
    ) -> None:
        self._root = root
        self._thread_id = threading.get_native_id() if thread_id is None else thread_id
        self._stat_files = Cgroups.find(root).stat_files()
        self._now, self._cpu_s = now, cpu_s
        self._major_faults, self._alloc_retries = major_faults, alloc_retries
        self._links = LinkReader()
        self._before = self._look()

    def read(self, step: int) -> HostClues:
        """Return what happened since the last call; of the first one, since this was made.

        Args:
            step: the one under way.
        """
        before, self._before = self._before, self._look()
        after = self._before
        throttled_s = [
            new - old for old, new in zip(before.throttled_s, after.throttled_s, strict=True)
        ]
        return HostClues(
            step=step,
            lasted_s=after.now_s - before.now_s,
            cpu_s=after.cpu_s - before.cpu_s,
            throttled_s=max([0.0, *throttled_s]),
            run_delay_s=max(0.0, after.run_delay_s - before.run_delay_s),
            major_faults=after.major_faults - before.major_faults,
            alloc_retries=after.alloc_retries - before.alloc_retries,
            links=self._links.read(),
        )

    def _look(self) -> _Look:
        return _Look(
            self._now(),
            self._cpu_s(),
            tuple(map(throttled_s, self._stat_files)),
            thread_times_s(self._root, self._thread_id)[1],
            self._major_faults(),
            self._alloc_retries(),
        )
