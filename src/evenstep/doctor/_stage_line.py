"""How far a checkup is, on stderr: a line for each stage."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO, final

QUIET_S = 2.0


@final
class StageLine:
    """Says what is being done, from two seconds on.

    Args:
        shows: whether anything is said at all: one rank speaks for all.
        stream: where to; None is stderr.
        clock: in seconds.
    """

    def __init__(
        self,
        shows: bool,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shows, self._stage = shows, ""
        self._stream, self._clock = stream or sys.stderr, clock
        self._from_s = clock() + QUIET_S

    def say(self, stage: str) -> None:
        """Name the stage, once."""
        if self._shows and stage != self._stage and self._clock() >= self._from_s:
            self._stage = stage
            print(f"evenstep doctor: {stage}", file=self._stream, flush=True)
