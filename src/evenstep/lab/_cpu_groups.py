"""CPU quotas by control groups, of both versions that Linux has: folders right under one root."""

from __future__ import annotations

import errno
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from ._host import LabUnavailable

PERIOD_US = 10_000
"""Quotas hold in each period of 10 ms: with the usual 100 ms, a step would feel single periods."""

_PATIENCE_S = 5.0


def find_cpu_groups(mounts: str) -> Path | None:
    """Return the folder of this machine's groups, by the text of ``/proc/self/mountinfo``.

    The first version if it has the CPU: then the second, mounted beside it or not, cannot.
    """
    second: Path | None = None
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        kind, *_, options = after.split(" ")
        # mountinfo writes blanks and backslashes as octal numbers.
        name = before.split(" ")[4].encode("latin-1", "replace").decode("unicode_escape")
        root = Path(name)
        if kind == "cgroup" and "cpu" in options.split(","):
            return root
        if kind == "cgroup2" and "cpu" in _controllers(root):
            second = root
    return second


def make_group(group: Path) -> None:
    """Make a group without a quota. Children of its processes belong to it as well."""
    group.mkdir()
    if not _is_second(group.parent):
        _write(group / "cpu.cfs_period_us", str(PERIOD_US))


def set_cpus(group: Path, cpus: float | None) -> None:
    """Let all processes of a group together have so many cores, from now on; None any.

    In the second version children get the CPU's controls by a switch. That is turned on with the
    first quota where it is off, as systemd does, and stays on: others may need it.

    Raises:
        LabUnavailable: groups cannot have quotas here.
    """
    if not _is_second(group.parent):
        quota_us = -1 if cpus is None else round(cpus * PERIOD_US)
        _write(group / "cpu.cfs_quota_us", str(quota_us))
        return
    file = group / "cpu.max"
    if cpus is None and not file.exists():
        return
    switch = group.parent / "cgroup.subtree_control"
    try:
        if "cpu" not in switch.read_text(encoding="ascii").split():
            _write(switch, "+cpu")
    except OSError as error:
        message = (
            f"CPU quotas need `+cpu` in {switch}, and the kernel refused it ({error}): in a "
            f"container its own processes are in the way. Run on the machine itself."
        )
        raise LabUnavailable(message) from error
    quota = "max" if cpus is None else str(round(cpus * PERIOD_US))
    _write(file, f"{quota} {PERIOD_US}")


def members_file(group: Path) -> Path:
    """Return where a process writes its number to join a group, in either version."""
    return group / "cgroup.procs"


def members(group: Path) -> list[int]:
    """Return the processes of a group; none where there is no such group."""
    try:
        return [int(pid) for pid in members_file(group).read_text(encoding="ascii").split()]
    except OSError:  # there is no such group, or no more
        return []


def remove_group(group: Path) -> None:
    """Kill the members of a group and delete it; nothing happens where there is none.

    Raises:
        OSError: its processes are there after seconds still.
    """
    until_s = time.monotonic() + _PATIENCE_S
    while True:
        for pid in members(group):
            if pid != os.getpid():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
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


def _is_second(root: Path) -> bool:
    """Return whether it is the second version: a hierarchy for all, and not one for the CPU."""
    return (root / "cgroup.controllers").exists()


def _controllers(root: Path) -> list[str]:
    try:
        return (root / "cgroup.controllers").read_text(encoding="ascii").split()
    except OSError:
        return []


def _write(file: Path, value: str) -> None:
    file.write_text(value, encoding="ascii")
