"""What the machine under a rank has to spare: CPU and memory, as NARX wants to know."""

from __future__ import annotations

from typing import Any, Protocol

import psutil  # type: ignore[import-untyped]

from ..policies._resources import reads_resources


class MachineReader(Protocol):
    """Reads one worker's machine. Anything with this method will do."""

    def read(self) -> tuple[float, int] | None:
        """Return the idle share of the CPU since the last call, in [0, 1], and free bytes.

        None where that is unknown.
        """


class PsutilReader:
    """Reads the whole host by psutil: in a container that is the host's load, not its quota.

    Some 0.1 ms a call, so it is read only for policies that use it.
    """

    def __init__(self) -> None:
        psutil.cpu_percent(interval=None)  # the first call has nothing to compare with

    def read(self) -> tuple[float, int]:
        """Return the idle share of all cores since the last call, and the available memory."""
        busy = psutil.cpu_percent(interval=None) / 100
        return min(max(1 - busy, 0.0), 1.0), int(psutil.virtual_memory().available)


def machine_reader_of(policy: Any, given: MachineReader | None = None) -> MachineReader | None:
    """Return what reads the machine, if ``policy`` asks: the given reader, or psutil."""
    return (given or PsutilReader()) if reads_resources(policy) else None
