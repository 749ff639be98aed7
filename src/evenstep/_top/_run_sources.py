"""A run that is followed: where its events come from, and its view, drawn again and again."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count, islice
from math import ceil
from pathlib import Path
from queue import Empty, Queue
from select import select
from time import monotonic, sleep, time
from types import EllipsisType
from typing import BinaryIO, Protocol, final

from rich.console import Console
from rich.live import Live

from .._telemetry import EventLines, FollowedFile, Line
from .._telemetry._event_lines import events_file, whole_lines
from ._live_run import LiveRun
from ._top_view import TopView

TAIL = 1 << 22
"""Bytes of a long file that are read at first: a hundred steps of 64 ranks and more."""
_BLOCK = 1 << 20
_WAITING = 64  # lines of a stream
_BEGIN = b'\n{"event": "Schema"'  # the line before a run's start


class Source(Protocol):
    """A run that is read a little at a time."""

    @property
    def run(self) -> LiveRun:
        """What is known of it."""

    @property
    def remark(self) -> str:
        """What of it was not read, as a sentence; nothing where all was."""

    @property
    def is_over(self) -> bool:
        """Whether nothing can come any more."""

    @property
    def silent_s(self) -> float:
        """Seconds since something was added, as far as is known."""

    def update(self, *, within_s: float) -> bool:
        """Read for so long at most; return whether something was new.

        Raises:
            ValueError: a newer evenstep wrote the lines, or none did.
            OSError: they cannot be read.
        """


@final
class FileSource:
    """The file of a run; it is read from its end at first where it is long.

    Then all that is added is. The newest start is looked for from the end backwards. A file that
    is replaced by another one is begun anew.

    Args:
        path: a run's folder or its ``events.jsonl``, which need not exist yet.
        clock: seconds, from any moment on.
    """

    is_over = False

    def __init__(self, path: Path, *, clock: Callable[[], float] = monotonic) -> None:
        self._path = path
        self._file: FollowedFile | None = None
        self._clock = clock
        self._pending: deque[Line] = deque()
        self._num_replaced = 0
        self._is_cut = self._is_caught_up = False
        self._new_s = self._age_s = 0.0
        self._anew()

    def _anew(self) -> None:
        self.run = LiveRun()
        self._lines = EventLines(str(self._path))

    @property
    def remark(self) -> str:
        notes = [f"only the last {TAIL >> 20} MiB were read at first"] if self._is_cut else []
        if left_out := self._lines.left_out:
            notes.append(left_out)
        return "; ".join(notes)

    @property
    def silent_s(self) -> float:
        return self._clock() - self._new_s if self._is_caught_up else 0.0

    def update(self, *, within_s: float) -> bool:
        if self._file is None:
            self._file = self._begun(events_file(self._path))
        until_s, is_new = self._clock() + within_s, False
        while self._pending or self._read(self._file):
            is_new = True
            _take(self._pending.popleft(), self._lines, self.run)
            if self._clock() >= until_s:
                break
        else:
            self._lines.check_end()
            if not self._is_caught_up:
                self._is_caught_up = True
                self._new_s = self._clock() - self._age_s
                return is_new
        if is_new:
            self._new_s = self._clock()
        return is_new

    def _read(self, file: FollowedFile) -> bool:
        lines = file.read()
        if file.num_replaced != self._num_replaced:
            self._num_replaced = file.num_replaced
            self._is_cut = False
            self._anew()
        self._pending.extend(lines)
        return bool(lines)

    def _begun(self, path: Path) -> FollowedFile:
        followed = FollowedFile(path)
        with path.open("rb") as file:
            # A machine with another clock is off by as much, until something is added.
            self._age_s = max(0.0, time() - os.fstat(file.fileno()).st_mtime)
            size = file.seek(0, os.SEEK_END)
            if size > 2 * TAIL:
                start, tail = _newest_start(file, size), size - TAIL
                if start < tail:
                    file.seek(start)
                    self._pending.extend(islice(whole_lines(file), 2))
                    self._is_cut = True
                followed.begin_at(max(start, tail))
        return followed


@final
class StreamSource:
    """A stream of lines, such as standard input from another machine; a thread reads it.

    Args:
        stream: opened, to be read to its end.
        clock: seconds, from any moment on.
    """

    def __init__(self, stream: BinaryIO, *, clock: Callable[[], float] = monotonic) -> None:
        self.run = LiveRun()
        self.is_over = False
        self._stream, self._clock = stream, clock
        self._lines = EventLines("standard input")
        self._queue: Queue[Line | EllipsisType] = Queue(_WAITING)  # a full one slows the writer
        self._thread: threading.Thread | None = None
        self._new_s: float | None = None

    @property
    def silent_s(self) -> float:
        return 0.0 if self._new_s is None else self._clock() - self._new_s

    @property
    def remark(self) -> str:
        return self._lines.left_out

    def update(self, *, within_s: float) -> bool:
        if self._thread is None:
            self._thread = threading.Thread(target=self._pass_on, name="evenstep-top", daemon=True)
            self._thread.start()
        until_s, is_new = self._clock() + within_s, False
        while not self.is_over and (left_s := until_s - self._clock()) > 0:
            try:
                line = self._queue.get(timeout=left_s)
            except Empty:
                break
            if isinstance(line, EllipsisType):
                self.is_over = True
                self._lines.check_end()
            else:
                is_new = True
                _take(line, self._lines, self.run)
        if is_new:
            self._new_s = self._clock()
        return is_new

    def _pass_on(self) -> None:
        with suppress(OSError):
            for line in whole_lines(self._stream):
                self._queue.put(line)
        self._queue.put(...)


def _take(line: Line, lines: EventLines, run: LiveRun) -> None:
    event = lines.read(line)
    if event is not None:
        run.add(event)


def _newest_start(file: BinaryIO, size: int) -> int:
    """Return where the newest run begins, however far off: 0.3 s for each GB that is cached.

    With the start of an older run, ranks would have other hosts, or be refused for their number.
    """
    end = size
    while end > 0:
        first = max(end - _BLOCK, 0)
        file.seek(first)
        at = file.read(end - first + len(_BEGIN)).rfind(_BEGIN)
        if at >= 0:
            return first + at + 1
        end = first
    return 0


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

    A file that is not there yet is waited for, and one that is gone may come back. Reading
    continues between two drawings, and takes half of the time at most: a long file is caught up
    with bit by bit.

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
