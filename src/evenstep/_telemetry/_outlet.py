"""Where events go: lines of a file, and hooks that training neither fails by nor waits for."""

from __future__ import annotations

import errno
import json
import logging
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from io import FileIO
from pathlib import Path
from queue import SimpleQueue
from time import monotonic
from typing import Any

from .. import __version__
from ..events import SCHEMA_VERSION, Event, Hook, to_record
from ._event_lines import LONGEST_LINE
from ._line import FaultLog, ProgressLine

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


class JsonLines:
    """Appends every event to ``path``, one JSON object a line, flushed at once.

    The first line of a run is ``{"event": "Schema", "version": 1}``: a reader checks it before
    the rest. A file that exists is continued, since a run may be resumed.

    Args:
        path: the file; its folder is made if need be.

    Raises:
        OSError: the file cannot be written, or another process writes to it.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():  # of another's making, it would have us write into any file of ours
            raise OSError(f"{path} is a symbolic link, which is not followed: remove it")
        self._path = path
        # Without a buffer: one that could not be written would be tried again at every close.
        self._file = open(path, "ab+", buffering=0, opener=_not_through_links)  # noqa: SIM115
        try:
            _lock(self._file)
        except OSError:
            self._file.close()
            raise
        _drop_cut_line(self._file)
        self._write({"event": "Schema", "version": SCHEMA_VERSION})

    def __repr__(self) -> str:
        return f"JsonLines({str(self._path)!r})"

    def __call__(self, event: Event) -> None:
        """Write ``event``; once closed, nothing.

        Raises:
            OSError: the disk is full, or the file is gone.
        """
        if not self._file.closed:
            self._write(to_record(event))

    def close(self) -> None:
        """Close the file. Events after that are dropped."""
        self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        line = memoryview((json.dumps(record) + "\n").encode())
        if os.fstat(self._file.fileno()).st_nlink == 0:  # written to, it would go nowhere
            raise FileNotFoundError(errno.ENOENT, "the file was deleted", str(self._path))
        while line:  # at once: a live view reads along, and a killed run keeps its last step
            line = line[self._file.write(line) :]


def _not_through_links(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def _lock(file: FileIO) -> None:
    """Keep a file for this process until it ends or closes it, where the file system has locks.

    Not by ``flock``: forked loader workers would hold that for a while after a kill.

    Raises:
        OSError: another process has it.
    """
    if fcntl is None:
        return
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise OSError(f"another run writes to {file.name}") from error


def _drop_cut_line(file: FileIO) -> None:
    """Take off what a killed run left of its last line; the next one would be glued to it."""
    size = file.seek(0, os.SEEK_END)
    first = max(size - LONGEST_LINE, 0)
    file.seek(first)
    newline = file.read().rfind(b"\n")
    if newline >= 0 or first == 0:  # what is longer is no line of ours
        file.truncate(first + newline + 1)  # in place: whole lines are never at stake


_OF_WEIGHT = ("torch", "tensorflow", "numpy")


def versions_here() -> tuple[str, ...]:
    """Return evenstep, Python and the frameworks that are loaded, such as ``"torch 2.13.0"``."""
    loaded = [(name, sys.modules.get(name)) for name in _OF_WEIGHT]
    others = [f"{name} {module.__version__}" for name, module in loaded if module is not None]
    return f"evenstep {__version__}", f"Python {platform.python_version()}", *others


_LOG = logging.getLogger("evenstep")


class Outlet:
    """Passes events on to one hook, from a thread that waits for it in the place of training.

    A hook that raises is reported once, through the logger ``evenstep``, and gets no more events.
    One that is slow or blocks finds ``capacity`` events waiting; what comes on top is dropped,
    which is reported once, and counted at the end.

    Args:
        hook: where events go.
        name: what to call it in a report; None is its own ``repr``.
        capacity: most events that wait, at least 1.
        finish: called by the thread after the last event, such as a file's ``close``.
    """

    def __init__(
        self,
        hook: Hook,
        *,
        name: str | None = None,
        capacity: int = 1000,
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._hook = hook
        self._name = repr(hook) if name is None else name
        self._capacity = capacity
        self._finish = finish
        self._queue: SimpleQueue[Event | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_broken = False
        self.num_dropped = 0

    def start(self) -> None:
        """Start the thread. Before this, events wait."""
        self._thread = threading.Thread(target=self._run, name="evenstep-sink", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        """Take ``event``; never waits."""
        if self._is_broken:
            return
        if self._queue.qsize() < self._capacity:
            self._queue.put(event)
            return
        self.num_dropped += 1
        if self.num_dropped == 1:
            _LOG.warning(
                "The telemetry sink %s is too slow: %d events wait for it, and more are dropped; "
                "training continues.",
                self._name,
                self._capacity,
            )

    def end(self) -> None:
        """Have the rest passed on and then the thread ended; does not wait for it."""
        self._queue.put(None)

    def close(self, *, within_s: float = 2.0) -> bool:
        """End, and wait for it; a thread that does not come to an end is left behind.

        Args:
            within_s: longest wait.

        Returns:
            Whether the hook got everything that was not dropped.
        """
        self.end()
        return self.wait(within_s)

    def wait(self, within_s: float) -> bool:
        """Wait for the end, once it was asked for, as ``close`` does."""
        thread, self._thread = self._thread, None
        if thread is None:
            return True
        thread.join(within_s)
        is_stuck = thread.is_alive()
        num_missed = self.num_dropped + max(0, self._queue.qsize() - 1)  # the end waits there too
        if num_missed or is_stuck:
            _LOG.warning(
                "The telemetry sink %s missed %d events%s.",
                self._name,
                num_missed,
                f" and did not end within {within_s:.3g} s" if is_stuck else "",
            )
        return not is_stuck

    def _run(self) -> None:
        while (event := self._queue.get()) is not None:
            if not self._is_broken:
                self._pass_on(event)
        if self._finish is not None:
            try:
                self._finish()
            except Exception as error:
                if not self._is_broken:
                    self._report(error, "at its end")

    def _pass_on(self, event: Event) -> None:
        try:
            self._hook(event)
        except (Exception, SystemExit) as error:  # the latter ends a thread without a word
            self._is_broken = True
            self._report(error, f"on {type(event).__name__}")

    def _report(self, error: BaseException, when: str) -> None:
        # A full disk is the user's to see, not ours to explain; a mistake in a hook has a place.
        trace = None if isinstance(error, OSError) else error
        _LOG.warning(
            "The telemetry sink %s failed %s (%s: %s) and gets no more events; training continues.",
            self._name,
            when,
            type(error).__name__,
            error,
            exc_info=trace,
        )


def close_all(outlets: Sequence[Outlet], *, within_s: float = 2.0) -> None:
    """Close several, all of them together within ``within_s``."""
    deadline_s = monotonic() + within_s
    for outlet in outlets:
        outlet.end()
    for outlet in outlets:
        outlet.wait(max(0.0, deadline_s - monotonic()))


def open_outlets(
    run_dir: str | Path | None, *, line_every: int | None, hooks: Iterable[Hook]
) -> list[Outlet]:
    """Return where rank 0's events go, not yet started.

    Args:
        run_dir: folder for ``events.jsonl``; None writes none. A folder that cannot be written to
            is a warning: training continues without.
        line_every: steps between two progress lines on standard error; None is faults alone.
        hooks: the user's own.
    """
    outlets = []
    if run_dir is not None:
        try:
            file = JsonLines(Path(run_dir) / "events.jsonl")
            outlets.append(Outlet(file, finish=file.close))
        except OSError as error:
            _LOG.warning(
                "No events are written to %s (%s); training continues. Give "
                "`Runtime(run_dir=...)` a folder of its own that rank 0 can write to.",
                run_dir,
                error,
            )
    outlets.append(Outlet(FaultLog(), name="standard error"))
    if line_every is not None:
        outlets.append(Outlet(ProgressLine(sys.stderr, line_every), name="standard error"))
    return outlets + [Outlet(hook) for hook in hooks]
