"""The view of a run, drawn again and again until its reader has seen enough."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from math import ceil
from select import select
from time import monotonic, sleep

from rich.console import Console
from rich.live import Live

from ._run_sources import Source
from ._top_view import TopView

_READ_S = 0.03  # seconds of one reading
_LONGEST_S = 1.0  # seconds between two readings: nothing piles up, and q is noticed meanwhile

Wait = Callable[[float], bool]
"""Waits for so many seconds; returns whether the reader wants to end."""


def watch(
    source: Source,
    console: Console,
    *,
    title: str,
    refresh_s: float,
    wait: Wait,
    clock: Callable[[], float] = monotonic,
) -> TopView:
    """Draw a run until ``wait`` says that it is enough, or its source is at its end.

    A file that is not there yet is waited for, and one that is gone may come back. Reading goes on
    between two drawings, and takes half of the time at most: a long file is caught up with bit by
    bit.

    Args:
        source: the run.
        console: a terminal.
        title: where the run is read from.
        refresh_s: seconds from one drawing to the next.
        wait: between readings.
        clock: seconds, from any moment on.

    Returns:
        What was seen last.

    Raises:
        ValueError: what is read is no run, or a newer evenstep's.
    """
    view = TopView(source.run, title)
    num_readings = ceil(refresh_s / _LONGEST_S)  # for each drawing
    every_s = refresh_s / num_readings
    with Live(view, console=console, screen=True, auto_refresh=False) as live:
        for reading in count():
            if source.is_over:
                break
            began_s = clock()
            remark = ""
            try:
                while source.update(within_s=_READ_S) and clock() - began_s < every_s / 2:
                    pass
            except OSError as error:
                remark = f"not to be read now: {error.strerror or error}"
            remark = "; ".join(filter(None, (source.remark, remark)))
            view = TopView(source.run, title, remark, source.silent_s)
            live.update(view, refresh=reading % num_readings == 0)
            if wait(max(0.0, every_s - (clock() - began_s))):
                break
    return view


@contextmanager
def quit_key() -> Iterator[Wait]:
    """Give a way to wait that ends early where q is typed; without a keyboard, none ends."""
    if sys.stdin is None or sys.stdin.closed or not sys.stdin.isatty():
        yield _slept
        return
    try:
        import termios
        import tty
    except ImportError:  # on Windows
        yield _slept
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield _key_within
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _slept(seconds: float) -> bool:
    sleep(seconds)
    return False


def _key_within(seconds: float) -> bool:
    until_s = monotonic() + seconds
    while True:
        ready, _, _ = select([sys.stdin], [], [], max(0.0, until_s - monotonic()))
        if not ready:
            return False
        if os.read(sys.stdin.fileno(), 64).lower() in (b"q", b""):
            return True
