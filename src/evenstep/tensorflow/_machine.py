"""What the machine under a worker has to spare, for policies that foresee speeds by it."""

from __future__ import annotations

import psutil  # type: ignore[import-untyped]


class MachineReader:
    """Reads the whole host by psutil: in a container that is the host's load, not its quota.

    Args:
        asked: whether a policy uses them; if not, nothing is read.
    """

    def __init__(self, *, asked: bool) -> None:
        self._asked = asked
        if asked:
            psutil.cpu_percent(interval=None)  # the first call has nothing to compare with

    def read(self) -> tuple[float | None, int]:
        """Return the idle share of all cores since the last call, and the available bytes."""
        if not self._asked:
            return None, 0
        busy = psutil.cpu_percent(interval=None) / 100
        return min(max(1 - busy, 0.0), 1.0), int(psutil.virtual_memory().available)
