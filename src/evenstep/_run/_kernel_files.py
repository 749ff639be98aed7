"""What Linux tells in small files of numbers: of memory, and of a thread's time."""

from __future__ import annotations

import os
from pathlib import Path

_MOST_BYTES = 65536  # at once


def contents(file: str | Path) -> bytes:
    """Return what is in a file; nothing where it cannot be read. Some 10 µs a file.

    By the system's own calls: after a second of sleep Python's files take twice as long.
    """
    try:
        number = os.open(file, os.O_RDONLY)
    except OSError:
        return b""
    try:
        text = part = os.read(number, _MOST_BYTES)
        while part:
            part = os.read(number, _MOST_BYTES)
            text += part
        return text
    except OSError:
        return b""
    finally:
        os.close(number)


def number_of(text: bytes, name: bytes) -> int | None:
    """Return the number after ``name`` at the beginning of a line; None where there is none.

    Args:
        text: lines as ``nr_throttled 3`` or ``MemAvailable:   6 kB``.
        name: with what stands before the blanks.
    """
    at = 0 if text.startswith(name + b" ") else text.find(b"\n" + name + b" ") + 1
    if at == 0 and not text.startswith(name + b" "):
        return None
    try:
        return int(text[at + len(name) :].split(None, 1)[0])
    except (ValueError, IndexError):
        return None


def available_bytes(root: Path) -> int | None:
    """Return the memory of the machine that is not in use; None where it is not told.

    Args:
        root: of the file system that is read.
    """
    kilobytes = number_of(contents(root / "proc/meminfo"), b"MemAvailable:")
    return None if kilobytes is None else 1024 * kilobytes


def thread_times_s(root: Path, thread_id: int) -> tuple[float, float]:
    """Return for how long a thread has run, and was ready and had no core; 0 where it is unknown.

    A wait for the next period of a quota counts as one for a core.

    Args:
        root: of the file system that is read.
        thread_id: the system's number of a thread of this process.
    """
    text = contents(f"{root}/proc/self/task/{thread_id}/schedstat")
    try:
        ran_ns, waited_ns = text.split()[:2]
        return int(ran_ns) / 1e9, int(waited_ns) / 1e9
    except ValueError:
        return 0.0, 0.0
