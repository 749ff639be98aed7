"""Signals that wait for the end of what must not be left half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def undisturbed() -> Iterator[None]:
    """Let Ctrl-C, and other signals that raise in Python, wait for the end of ``with``.

    Half a namespace would be mounted after it was removed, and a process that is not written
    down would live on. Signals reach the main thread alone: in others this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        waiting.append(number)

    kinds = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # What the system handles by itself, or a script ignores, stays as it is.
    handlers = {kind: signal.getsignal(kind) for kind in kinds}
    raising = {kind: handler for kind, handler in handlers.items() if callable(handler)}
    try:
        for kind in raising:
            signal.signal(kind, hold)
        yield
    finally:
        for kind, handler in raising.items():
            signal.signal(kind, handler)
        if waiting:
            signal.raise_signal(waiting[0])
