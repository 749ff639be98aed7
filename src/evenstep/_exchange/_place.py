"""Where a thread is, in the words of a user's own script."""

from __future__ import annotations

import gc
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import FrameType

from ._message_kinds import Place

_OURS = Path(__file__).parents[1].as_posix() + "/"
_STDLIB = Path(sysconfig.get_path("stdlib")).as_posix() + "/"


ENDED = Place("past its training thread's end", in_collective=False, compiling=False)


@dataclass(frozen=True, slots=True)
class Framework:
    """What is to be known of a framework by what carries plans for it.

    Attributes:
        place_of: tells where a thread is, by its number.
        is_stuck: tells whether a thread sits in a collective of the framework's, by its number.
        restart: what starts a run anew, for errors.
        training_thread: the number of the thread that trains, asked at its plan points.
        num_collectives: how many collectives this process has begun in each process group, by a
            name that its other ranks have for it, too.
    """

    place_of: Callable[[int], Place]
    is_stuck: Callable[[int], bool]
    restart: str
    training_thread: Callable[[], int] = threading.get_ident
    num_collectives: Callable[[], Mapping[str, int]] = dict


def frame_of(thread_id: int) -> FrameType | None:
    """Return the innermost frame of a thread; None once the thread has ended.

    Without garbage collection. CPython 3.11 holds a lock of its runtime while it lists the frames.
    If it collects garbage meanwhile, a destructor may let other threads run, as that of a loader
    with workers does, and one that ends waits for the lock with Python's own: the process stands
    still for good (cpython#106883).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread_id)
    finally:
        if collects:
            gc.enable()


def frames(innermost: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those that called it."""
    while innermost is not None:
        yield innermost
        innermost = innermost.f_back


def file_of(frame: FrameType) -> str:
    """Return the file of its code, with slashes."""
    return frame.f_code.co_filename.replace(os.sep, "/")


def awaits_message(innermost: FrameType) -> bool:
    """Tell whether a thread waits for what another rank sends."""
    router = _OURS + "_exchange/_router.py"
    return any(file_of(frame) == router for frame in frames_below_user(innermost))


def frames_below_user(innermost: FrameType) -> Iterator[FrameType]:
    """Yield the frames that the innermost line of the user's own has called, innermost first."""
    return takewhile(lambda frame: _is_machinery(file_of(frame)), frames(innermost))


def line_of_user(innermost: FrameType) -> str:
    """Return the innermost line that is neither Python's, nor installed, nor our own."""
    for frame in frames(innermost):
        if not _is_machinery(file := file_of(frame)):
            return f"at {file}:{frame.f_lineno} in {frame.f_code.co_name}"
    return f"in {file_of(innermost)}"


def _is_machinery(file: str) -> bool:
    installed = "/site-packages/" in file or "/dist-packages/" in file
    return installed or file.startswith(("<frozen", _OURS, _STDLIB))
