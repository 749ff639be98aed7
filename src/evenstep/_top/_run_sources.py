"""A run that is followed: where its events come from, and its view, drawn again and again."""

from __future__ import annotations

import os
import sys
import threading
from abc import ABC, abstractmethod
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
from typing import BinaryIO, final

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


class Source(ABC):
    """A run that is read a little at a time.

    Attributes:
        run: what is known of it.
        is_over: whether nothing can come any more.
    """

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self.is_over = False
        self._name, self._clock = name, clock
        self._pending: deque[Line] = deque()
        self._new_s: float | None = None  # when something was added, once that is known
        self._anew()

    def _anew(self) -> None:
        self.run = LiveRun()
        self._lines = EventLines(self._name)

    @property
    def remark(self) -> str:
        """What of it was not read, as a sentence; nothing where all was."""
        return self._lines.left_out

    @property
    def silent_s(self) -> float:
        """Seconds since something was added, as far as is known."""
        return 0.0 if self._new_s is None else self._clock() - self._new_s

    def update(self, *, within_s: float) -> bool:
        """Read for so long at most; return whether something was new.

        Raises:
            ValueError: a newer evenstep wrote the lines, or none did.
            OSError: they cannot be read.
        """
        until_s, is_known, is_new = self._clock() + within_s, self._new_s is not None, False
        while (left_s := until_s - self._clock()) > 0 and (self._pending or self._more(left_s)):
            is_new = True
            event = self._lines.read(self._pending.popleft())
            if event is not None:
                self.run.add(event)
        if is_new and is_known:
            self._new_s = self._clock()
        return is_new

    @abstractmethod
    def _more(self, left_s: float) -> bool:
        """Have more lines pending, within so many seconds; return whether there are any."""


@final
class FileSource(Source):
    """The file of a run; it is read from its end at first where it is long.

    Then all that is added is. The newest start is looked for from the end backwards. A file that
    is replaced by another one is begun anew.

    Args:
        path: a run's folder or its ``events.jsonl``, which need not exist yet.
        clock: seconds, from any moment on.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = monotonic) -> None:
        super().__init__(str(path), clock)
        self._path = path
        self._file: FollowedFile | None = None
        self._age_s, self._is_cut = 0.0, False

    @property
    def remark(self) -> str:
        cut = f"only the last {TAIL >> 20} MiB were read at first" if self._is_cut else ""
        return "; ".join(filter(None, (cut, super().remark)))

    def _more(self, left_s: float) -> bool:
        if self._file is None:
            self._file = self._begun(events_file(self._path))
            if self._pending:
                return True
        lines = self._file.read()
        if self._file.num_replaced:
            self._file.num_replaced, self._is_cut = 0, False
            self._anew()
        self._pending.extend(lines)
        if not lines:
            self._lines.check_end()
            if self._new_s is None:
                self._new_s = self._clock() - self._age_s
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
class StreamSource(Source):
    """A stream of lines, such as standard input from another machine; a thread reads it.

    Args:
        stream: opened, to be read to its end.
        clock: seconds, from any moment on.
    """

    def __init__(self, stream: BinaryIO, *, clock: Callable[[], float] = monotonic) -> None:
        super().__init__("standard input", clock)
        self._stream = stream
        self._queue: Queue[Line | EllipsisType] = Queue(_WAITING)  # a full one slows the writer
        threading.Thread(target=self._pass_on, name="evenstep-top", daemon=True).start()

    def _more(self, left_s: float) -> bool:
        if self.is_over:
            return False
        try:
            line = self._queue.get(timeout=left_s)
        except Empty:
            return False
        if isinstance(line, EllipsisType):
            self.is_over = True
            self._lines.check_end()
            return False
        self._pending.append(line)
        self._new_s = self._clock()
        return True

    def _pass_on(self) -> None:
        with suppress(OSError):
            for line in whole_lines(self._stream):
                self._queue.put(line)
        self._queue.put(...)


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
