"""CPU quotas by control groups, of both versions that Linux has."""

from __future__ import annotations

import abc
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import final

from ._host import LabUnavailable

PERIOD_US = 10_000
"""Quotas hold in each period of 10 ms: with the usual 100 ms, a step would feel single periods."""

_PATIENCE_S = 5.0


class AbstractCpuGroups(abc.ABC):
    """Groups of processes right under one folder, each with a quota of its own.

    Args:
        root: the folder, where a hierarchy with the CPU's controls is mounted.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @abc.abstractmethod
    def make(self, name: str) -> None:
        """Make a group without a quota. Children of its processes belong to it as well."""

    @abc.abstractmethod
    def set_cpus(self, name: str, cpus: float | None) -> None:
        """Let all processes of a group together have so many cores, from now on; None any.

        Raises:
            LabUnavailable: groups cannot have quotas here.
        """


@final
class CpuGroupsV1(AbstractCpuGroups):
    """The first version: a hierarchy of its own for the CPU."""

    def make(self, name: str) -> None:
        (self.root / name).mkdir()
        _write(self.root / name / "cpu.cfs_period_us", str(PERIOD_US))

    def set_cpus(self, name: str, cpus: float | None) -> None:
        quota_us = -1 if cpus is None else round(cpus * PERIOD_US)
        _write(self.root / name / "cpu.cfs_quota_us", str(quota_us))


@final
class CpuGroupsV2(AbstractCpuGroups):
    """The second version: one hierarchy, in which children get the CPU's controls by a switch.

    That switch is turned on with the first quota where it is off, as systemd does, and stays on:
    others may need it.
    """

    def make(self, name: str) -> None:
        (self.root / name).mkdir()

    def set_cpus(self, name: str, cpus: float | None) -> None:
        file = self.root / name / "cpu.max"
        if cpus is None and not file.exists():
            return
        self._pass_on()
        quota = "max" if cpus is None else str(round(cpus * PERIOD_US))
        _write(file, f"{quota} {PERIOD_US}")

    def _pass_on(self) -> None:
        """Give groups the CPU's controls."""
        switch = self.root / "cgroup.subtree_control"
        try:
            if "cpu" not in switch.read_text(encoding="ascii").split():
                _write(switch, "+cpu")
        except OSError as error:
            message = (
                f"CPU quotas need `+cpu` in {switch}, and the kernel refused it ({error}): in a "
                f"container its own processes are in the way. Run on the machine itself."
            )
            raise LabUnavailable(message) from error


def find_cpu_groups(mounts: str) -> AbstractCpuGroups | None:
    """Return the groups that this machine has, by the text of ``/proc/self/mountinfo``.

    The first version if it has the CPU: then the second, mounted beside it or not, cannot.
    """
    second: AbstractCpuGroups | None = None
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        kind, *_, options = after.split(" ")
        root = Path(_unescaped(before.split(" ")[4]))
        if kind == "cgroup" and "cpu" in options.split(","):
            return CpuGroupsV1(root)
        if kind == "cgroup2" and "cpu" in _controllers(root):
            second = CpuGroupsV2(root)
    return second


def members_file(group: Path) -> Path:
    """Return where a process writes its number to join a group, in either version."""
    return group / "cgroup.procs"


def members(group: Path) -> list[int]:
    """Return the processes of a group; none where there is no such group."""
    try:
        return [int(pid) for pid in members_file(group).read_text(encoding="ascii").split()]
    except OSError:  # there is no such group, or no more
        return []


def remove_group(group: Path, kill: Callable[[int], None]) -> None:
    """Kill the members of a group and delete it; nothing happens where there is none.

    Args:
        group: its folder.
        kill: ends a process, by number.

    Raises:
        OSError: its processes are there after seconds still.
    """
    until_s = time.monotonic() + _PATIENCE_S
    while True:
        for pid in members(group):
            if pid != os.getpid():
                kill(pid)
        try:
            group.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            # Killed processes leave a group only when the kernel has taken them apart.
            if error.errno != errno.EBUSY or time.monotonic() > until_s:
                raise
            time.sleep(0.01)
        else:
            return


def _controllers(root: Path) -> list[str]:
    try:
        return (root / "cgroup.controllers").read_text(encoding="ascii").split()
    except OSError:
        return []


def _write(file: Path, value: str) -> None:
    file.write_text(value, encoding="ascii")


def _unescaped(text: str) -> str:
    """Return a path of mountinfo, which writes blanks and backslashes as octal numbers."""
    return text.encode("latin-1", "replace").decode("unicode_escape")
