"""What Linux reports of a process and its machine: control groups, memory, threads, and clues."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, final

from .._diagnosis import HostClues
from ._connections import LinkReader

_MOST_BYTES = 65536  # at once


def contents(file: str | Path) -> bytes:
    """Return what is in a file; nothing where it cannot be read. Some 10 µs a file.

    By the system's own calls: after a second of sleep Python's files take twice as long.
    """
    try:
        number = os.open(file, os.O_RDONLY)
    except OSError:
        return b""
    try:
        text = part = os.read(number, _MOST_BYTES)
        while part:
            part = os.read(number, _MOST_BYTES)
            text += part
        return text
    except OSError:
        return b""
    finally:
        os.close(number)


def number_of(text: bytes, name: bytes) -> int | None:
    """Return the number after ``name`` at the beginning of a line; None where there is none.

    Args:
        text: lines as ``nr_throttled 3`` or ``MemAvailable:   6 kB``.
        name: with what stands before the blanks.
    """
    at = 0 if text.startswith(name + b" ") else text.find(b"\n" + name + b" ") + 1
    if at == 0 and not text.startswith(name + b" "):
        return None
    try:
        return int(text[at + len(name) :].split(None, 1)[0])
    except (ValueError, IndexError):
        return None


def available_bytes(root: Path) -> int | None:
    """Return the memory of the machine that is not in use; None where it is not reported.

    Args:
        root: of the file system that is read.
    """
    kilobytes = number_of(contents(root / "proc/meminfo"), b"MemAvailable:")
    return None if kilobytes is None else 1024 * kilobytes


def thread_times_s(root: Path, thread_id: int) -> tuple[float, float]:
    """Return for how long a thread has run, and was ready and had no core; 0 where it is unknown.

    A wait for the next period of a quota counts as one for a core.

    Args:
        root: of the file system that is read.
        thread_id: the system's number of a thread of this process.
    """
    text = contents(f"{root}/proc/self/task/{thread_id}/schedstat")
    try:
        ran_ns, waited_ns = text.split()[:2]
        return int(ran_ns) / 1e9, int(waited_ns) / 1e9
    except ValueError:
        return 0.0, 0.0


_NO_LIMIT = 1 << 60  # bytes from which on the first version's number stands for no limit


Quota = tuple[float, Path]
"""CPU seconds per second, above 0, that all processes of a group may use, and the file for it."""


@dataclass(frozen=True, slots=True)
class Cgroups:
    """Folders of the process's groups and of all around them, the innermost first.

    A group is bound by those around it, so the tightest limit counts. All is read anew at every
    call. What is not there, or is no number, is no limit.

    Attributes:
        first_cpu: folders of the first version, of the hierarchy with CPU quotas.
        first_memory: likewise, with memory.
        second: folders of the second version, which has a single hierarchy.
    """

    first_cpu: tuple[Path, ...] = ()
    first_memory: tuple[Path, ...] = ()
    second: tuple[Path, ...] = ()

    @classmethod
    def find(cls, root: Path = Path("/")) -> Cgroups:
        """Return where they are: nowhere outside Linux. Takes some tenths of a millisecond.

        Args:
            root: of the file system that is read.
        """
        found: dict[str, list[Path]] = {"cpu": [], "memory": [], "": []}
        for controller, folder in _folders(root):
            found[controller].append(folder)
        return cls(tuple(found["cpu"]), tuple(found["memory"]), tuple(found[""]))

    def quota(self) -> Quota | None:
        """Return the tightest quota in force now; None is no limit."""
        second = (_second_quota(folder) for folder in self.second)
        first = (_first_quota(folder) for folder in self.first_cpu)
        return min((quota for quota in (*second, *first) if quota is not None), default=None)

    def free_bytes(self) -> int | None:
        """Return the memory that is left now under the tightest limit; None is no limit.

        Files that the group caches count as free: it gives them back when it needs memory.
        """
        second = (
            _free_bytes(folder, b"inactive_file", "memory.max", "memory.current")
            for folder in self.second
        )
        limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        first = (
            _free_bytes(folder, b"total_inactive_file", limit, usage)
            for folder in self.first_memory
        )
        return min((left for left in (*second, *first) if left is not None), default=None)

    def throttled_s(self) -> tuple[float, ...]:
        """Return for how long quotas have held back each group, the innermost first; 0 if never.

        On several CPUs at once, that is the sum over them.
        """
        return tuple(map(throttled_s, self.stat_files()))

    def stat_files(self) -> tuple[str, ...]:
        """Return the ``cpu.stat`` of each group, for those who look often."""
        return tuple(f"{folder}/cpu.stat" for folder in self.second + self.first_cpu)

    def waited_s(self) -> float | None:
        """Return for how long some process of the own group was ready and had no core.

        By pressure stall information, which the second version has; None where there is none.
        Waits for the next period of a quota are in it.
        """
        for folder in self.second[:1]:
            for line in contents(folder / "cpu.pressure").splitlines():
                kind, _, total = line.partition(b" avg10=")
                if kind == b"some" and (number := total.rpartition(b"total=")[2]).isdigit():
                    return int(number) / 1e6
        return None


def throttled_s(file: str | Path) -> float:
    """Return for how long its quota has held a group back, by its ``cpu.stat``; 0 if never."""
    text = contents(file)
    if (second_us := number_of(text, b"throttled_usec")) is not None:
        return second_us / 1e6
    return (number_of(text, b"throttled_time") or 0) / 1e9


def _second_quota(folder: Path) -> Quota | None:
    file = folder / "cpu.max"
    try:
        quota, period = map(int, contents(file).split())  # "max" is no number, and no limit
        return quota / period, file
    except (ValueError, ZeroDivisionError):
        return None


def _first_quota(folder: Path) -> Quota | None:
    file = folder / "cpu.cfs_quota_us"
    try:
        limit_us = int(contents(file))
        if limit_us <= 0:
            return None
        return limit_us / int(contents(folder / "cpu.cfs_period_us")), file
    except (ValueError, ZeroDivisionError):
        return None


def _free_bytes(folder: Path, cached: bytes, most: str, used: str) -> int | None:
    try:
        limit = int(contents(folder / most))
        if limit >= _NO_LIMIT:
            return None
        usage = int(contents(folder / used))
    except ValueError:
        return None
    return max(0, limit - usage + (number_of(contents(folder / "memory.stat"), cached) or 0))


def _folders(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield the controller, which the second version does not name, and the folder."""
    of: dict[str, str] = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        of |= dict.fromkeys(controllers.split(","), path)
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if len(fields) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        # The first version has a hierarchy for each controller, the second a single one, unnamed.
        here = {""} if kind[0] == "cgroup2" else {"cpu", "memory"} & set(kind[2].split(","))
        for controller in here & of.keys():
            for folder in _upwards(root / fields[4].lstrip("/"), fields[3], of[controller]):
                yield controller, folder


def _lines(file: Path) -> list[str]:
    return contents(file).decode("utf-8", "replace").splitlines()


def _upwards(mount: Path, mounted: str, path: str) -> Iterator[Path]:
    """Yield the group's folder and those around it, as far as they are mounted here."""
    inside = path.removeprefix(mounted.rstrip("/")) if mounted != "/" else path
    folder = mount / inside.lstrip("/")
    if ".." in Path(inside).parts or not folder.is_dir():
        folder = mount  # a container sees its own group alone, under the name that the host has
    while folder != mount:
        yield folder
        folder = folder.parent
    yield mount


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
        grown = (new - old for old, new in zip(before, self._before, strict=True))
        lasted_s, cpu_s, delay_s, num_faults, num_retries, *throttled_s = grown
        return HostClues(
            step=step,
            lasted_s=round(lasted_s, 4),
            cpu_s=round(cpu_s, 4),
            throttled_s=round(max([0.0, *throttled_s]), 4),
            run_delay_s=round(max(0.0, delay_s), 4),
            major_faults=int(num_faults),
            alloc_retries=int(num_retries),
            links=self._links.read(),
        )

    def _look(self) -> tuple[float, ...]:
        """Return what was counted so far; at last for how long each group was held back."""
        return (
            self._now(),
            self._cpu_s(),
            thread_times_s(self._root, self._thread_id)[1],
            self._major_faults(),
            self._alloc_retries(),
            *map(throttled_s, self._stat_files),
        )
