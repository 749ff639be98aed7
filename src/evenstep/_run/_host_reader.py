"""What a process and its machine went through since the last look: clues of why ranks wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, final

from .._diagnosis import HostClues

_MOST_FILES = 4  # of nested cgroups: the process's own, and those around it


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
    """Reads what the system counts of this process, once a second or so.

    About 0.1 ms a look. What the system does not offer stays 0: all but CPU seconds and page faults
    are Linux's.

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
        number = threading.get_native_id() if thread_id is None else thread_id
        self._schedule = root / "proc/self/task" / str(number) / "schedstat"
        self._quotas = tuple(_quota_files(root))
        self._now, self._cpu_s = now, cpu_s
        self._major_faults, self._alloc_retries = major_faults, alloc_retries
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
        )

    def _look(self) -> _Look:
        return _Look(
            self._now(),
            self._cpu_s(),
            tuple(_throttled_s(file) for file in self._quotas),
            _run_delay_s(self._schedule),
            self._major_faults(),
            self._alloc_retries(),
        )


def _run_delay_s(file: Path) -> float:
    """Return for how long a thread was ready to run and had no core."""
    try:
        return int(file.read_bytes().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _throttled_s(file: Path) -> float:
    """Return for how long a cgroup was held back by its quota: version 2 says it in µs, 1 in ns."""
    try:
        lines = (line.split() for line in file.read_bytes().splitlines())
        for name, *values in lines:
            if name == b"throttled_usec":
                return int(values[0]) / 1e6
            if name == b"throttled_time":
                return int(values[0]) / 1e9
    except (OSError, ValueError, IndexError):
        pass
    return 0.0


def _quota_files(root: Path) -> Iterator[Path]:
    """Yield the ``cpu.stat`` of this process's cgroup and of those around it, at most four.

    Inside a container the path may be that of the host, which is not there: its root is, then.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text("utf-8").splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / controllers
        if not top.is_dir():
            top = root / "sys/fs/cgroup" / ("cpu" if controllers else "unified")
        own = top / path.strip("/")
        inner = [each for each in (own, *own.parents) if each.is_relative_to(top)]
        files = [file for each in inner if (file := each / "cpu.stat").is_file()]
        if files:
            yield from files[:_MOST_FILES]
            return
