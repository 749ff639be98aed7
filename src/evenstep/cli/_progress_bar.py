"""How far a long command is, on stderr; nothing where it is over in two seconds."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

QUIET_S = 2.0
EVERY_S = {True: 0.5, False: 15.0}  # on a terminal, and elsewhere


class Progress:
    """Says in words how many of some runs are done, as they are done.

    On a terminal one line is written over and over, and taken away in the end; elsewhere there
    is a line now and then.

    Args:
        total: runs to come.
        stream: where to; None is stderr.
        quiet_s: seconds in which nothing is said.
    """

    def __init__(
        self, total: int, *, stream: TextIO | None = None, quiet_s: float = QUIET_S
    ) -> None:
        self._total = total
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._done, self._width = 0, 0
        self._began_s = time.monotonic()
        self._next_s = self._began_s + quiet_s

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._width:
            self._stream.write(f"\r{' ' * self._width}\r")
            self._stream.flush()

    def step(self) -> None:
        """Count one run as done, and say so if it is time to."""
        self._done += 1
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + EVERY_S[self._is_terminal]
            self._say(describe(self._done, self._total, now_s - self._began_s))

    def _say(self, text: str) -> None:
        if self._is_terminal:
            self._stream.write(f"\r{text:<{self._width}}")
            self._width = max(self._width, len(text))
        else:
            self._stream.write(f"{text}\n")
        self._stream.flush()


def describe(done: int, total: int, took_s: float) -> str:
    """Return how far it is, and how long the rest takes if it goes on like that."""
    left_s = took_s / done * (total - done)
    words = f"{left_s:.0f} s" if left_s < 90 else f"{left_s / 60:.0f} min"
    return f"evenstep: {done} of {total} runs, about {words} left"
