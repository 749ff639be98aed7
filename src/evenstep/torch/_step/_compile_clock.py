"""How long torch compiled in this process."""

from __future__ import annotations

import sys
from time import perf_counter
from typing import Any, final

from ..._private_torch import compile_callbacks


@final
class CompileClock:
    """Counts the time in which something is compiled, once torch's compiler is there.

    Attributes:
        total_s: seconds so far.
    """

    def __init__(self) -> None:
        self._handler: Any = None
        self._start, self._end = self._begins, self._ends  # once: they are looked for often
        self._begun_s: float | None = None
        self.total_s = 0.0

    def listen(self) -> None:
        """See to it that torch calls back; a reset of its compiler forgets us."""
        if self._handler is None:
            if "torch._dynamo" not in sys.modules:
                return
            self._handler = compile_callbacks()
        if self._start not in self._handler.start_callbacks:
            self._handler.register_start_callback(self._start)
        if self._end not in self._handler.end_callbacks:
            self._handler.register_end_callback(self._end)

    def close(self) -> None:
        """Count no more."""
        if self._handler is not None:
            if self._start in self._handler.start_callbacks:
                self._handler.remove_start_callback(self._start)
            if self._end in self._handler.end_callbacks:
                self._handler.remove_end_callback(self._end)

    def _begins(self, _: Any) -> None:
        self._begun_s = perf_counter()

    def _ends(self, _: Any) -> None:
        if self._begun_s is not None:
            self.total_s += perf_counter() - self._begun_s
            self._begun_s = None
