"""The free CPU and memory of a rank's machine, which NARX uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import psutil  # type: ignore[import-untyped]

from .._planner import blaming
from ..policies._resources import reads_resources
from ._process_reader import ProcessReader


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


def machine_reader_of(policy: Any, given: MachineReader | None = None) -> MachineReader | None:
    """Return what reads the machine, if ``policy`` asks: the given reader, or this system's."""
    if not reads_resources(policy):
        return None
    return given or own_reader()


def read_by(reader: MachineReader) -> tuple[float, int] | None:
    """Return what ``reader`` says, in Python's own numbers: messages carry no others.

    Raises:
        UserMistake: a user's reader failed, or said something else.
    """
    with blaming(reader):
        found = reader.read()
        return None if found is None else (float(found[0]), int(found[1]))


def own_reader(root: Path = Path("/")) -> MachineReader:
    """Return what reads this process, where the system has such files; else the whole host's.

    Args:
        root: of the file system, where ``proc`` would lie.
    """
    return ProcessReader(root=root) if (root / "proc/self/cgroup").exists() else PsutilReader()
