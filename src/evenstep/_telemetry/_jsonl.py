"""Events as lines of JSON, appended to one file per run."""

from __future__ import annotations

import errno
import json
import os
import platform
import sys
from io import FileIO
from pathlib import Path
from typing import Any

from .. import __version__
from ..events import SCHEMA_VERSION, Event, to_record

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_BLOCK = 1 << 16


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
    size = end = file.seek(0, os.SEEK_END)
    while end:  # from the end, and in place: whole lines are never at stake
        first = max(end - _BLOCK, 0)
        file.seek(first)
        newline = file.read(end - first).rfind(b"\n")
        if newline >= 0:
            end = first + newline + 1
            break
        end = first
    if end < size:
        file.truncate(end)


_OF_WEIGHT = ("torch", "tensorflow", "numpy")


def versions_here() -> tuple[str, ...]:
    """Return evenstep, Python and the frameworks that are loaded, such as ``"torch 2.13.0"``."""
    loaded = [(name, sys.modules.get(name)) for name in _OF_WEIGHT]
    others = [f"{name} {module.__version__}" for name, module in loaded if module is not None]
    return f"evenstep {__version__}", f"Python {platform.python_version()}", *others
