"""How far a long command is, on stderr; nothing where it is over in two seconds."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TextIO

QUIET_S = 2.0
EVERY_S = {True: 0.5, False: 15.0}  # whether someone is looking on a terminal


class Progress:
    """Says in words how many of some runs are done, from a thread of its own.

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
        self._total, self._quiet_s = total, quiet_s
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._done, self._width = 0, 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._began_s = time.monotonic()

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
        if self._width:
            self._stream.write(f"\r{' ' * self._width}\r")
            self._stream.flush()

    def step(self) -> None:
        """Count one run as done."""
        self._done += 1

    def _watch(self) -> None:
        wait_s = self._quiet_s
        while not self._ended.wait(wait_s):
            self._say(describe(self._done, self._total, time.monotonic() - self._began_s))
            wait_s = EVERY_S[self._is_terminal]

    def _say(self, text: str) -> None:
        if self._is_terminal:
            self._stream.write(f"\r{text:<{self._width}}")
            self._width = max(self._width, len(text))
        else:
            self._stream.write(f"{text}\n")
        self._stream.flush()


def describe(done: int, total: int, took_s: float) -> str:
    """Return how far it is, and how long the rest takes if it goes on like that."""
    text = f"evenstep: {done} of {total} runs"
    if not done:
        return text
    left_s = took_s / done * (total - done)
    words = f"{left_s:.0f} s" if left_s < 90 else f"{left_s / 60:.0f} min"
    return f"{text}, about {words} left"
