"""How far a checkup is, on stderr: one line that is written over, or a line a stage."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO, final

QUIET_S = 2.0


@final
class StageLine:
    """Shows what is being done, from two seconds on; gone at the end of ``with``.

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
        self._shows = shows
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._from_s = clock() + QUIET_S
        self._width, self._stage, self._text = 0, "", ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._width:
            self._stream.write(f"\r{' ' * self._width}\r")
            self._stream.flush()

    def say(self, stage: str, detail: str = "") -> None:
        """Show the stage, and on a terminal how far it is as well."""
        if not self._shows or self._clock() < self._from_s:
            return
        text = f"evenstep doctor: {stage}{detail}"
        if text == self._text:
            return
        self._text = text
        if self._stream.isatty():
            self._stream.write(f"\r{text:<{self._width}}")
            self._width = max(self._width, len(text))
        elif stage != self._stage:
            self._stage = stage
            self._stream.write(f"{text}\n")
        self._stream.flush()
