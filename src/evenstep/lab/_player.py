"""A trace, carried out while something else runs."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Protocol, final

from ._host import Rate
from ._trace import Change, Trace


class Adjustable(Protocol):
    """What a trace changes: a lab."""

    def set_mbit(self, host: int, mbit: Rate | None) -> None:
        """Change a link."""

    def set_cpus(self, host: int, cpus: float | None) -> None:
        """Change a quota."""


@final
class Player:
    """Carries out a trace in a thread of its own, from ``with`` to its end or the trace's.

    What the trace has at 0 is in force when ``with`` begins. What fails later is raised at its end.

    Args:
        lab: whose links and quotas change.
        trace: what becomes of them; its times count from ``with``.
    """

    def __init__(self, lab: Adjustable, trace: Trace) -> None:
        self._lab, self._trace = lab, trace
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="evenstep-lab-trace", daemon=True)

    def __enter__(self) -> None:
        for change in self._trace.changes:
            if change.at_s == 0:
                self._apply(change)
        self._began_s = time.monotonic()
        self._thread.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is None:
            return
        if error is None:
            raise self._error
        error.add_note(f"The trace ended early: {self._error}")

    def _run(self) -> None:
        try:
            for change in self._trace.changes:
                if change.at_s == 0:
                    continue
                if self._stop.wait(max(self._began_s + change.at_s - time.monotonic(), 0.0)):
                    return
                self._apply(change)
        except Exception as failure:
            self._error = failure

    def _apply(self, change: Change) -> None:
        if change.mbit is not None:
            self._lab.set_mbit(change.host, change.mbit)
        if change.cpus is not None:
            self._lab.set_cpus(change.host, change.cpus)
