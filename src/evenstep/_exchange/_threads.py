"""Threads and processes: where one is, whether it has ended, how to interrupt and end it."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from multiprocessing.util import Finalize
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._message_kinds import ThreadLocation

_OURS = Path(__file__).parents[1].as_posix() + "/"
_STDLIB = Path(sysconfig.get_path("stdlib")).as_posix() + "/"
_BOOT, _NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
_NETWORK = Path("/proc/self/ns/net")


@dataclass(frozen=True, slots=True)
class Framework:
    """What is to be known of a framework by what carries plans for it.

    Attributes:
        place_of: returns where a thread is, by its number.
        is_stuck: returns whether a thread sits in a collective of the framework's, by its number.
        restart: what starts a run anew, for errors.
        training_thread: the number of the thread that trains, asked at its plan points.
        num_collectives: how many collectives this process has begun in each process group, by a
            name that its other ranks have for it, too.
    """

    place_of: Callable[[int], ThreadLocation]
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
    """Return whether a thread waits for what another rank sends."""
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
    return installed or file.startswith(("<frozen", _OURS, _STDLIB, *_frameworks()))


def _frameworks() -> Iterator[str]:
    """Yield the folders of frameworks: one that was built in place is not among the installed."""
    for name in ("torch", "tensorflow"):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None:
            yield Path(file).parent.as_posix() + "/"


def process_name() -> str | None:
    """Return a name of this process by which others on its machine can find it.

    None where none can be found, as outside Linux.
    """
    with suppress(OSError):
        # Containers number their processes anew: a number means nothing outside of its namespace.
        return f"{_machine()}/{_NAMESPACE.stat().st_ino}/{os.getpid()}"
    return None


def network_name() -> str:
    """Return a name that processes share which reach each other by the loopback.

    Host names alone do not suffice: machines may share one, and containers on one machine have
    networks of their own. Where there is nothing else, as outside Linux, the host name it is.
    """
    with suppress(OSError):
        return f"{_machine()}/{_NETWORK.stat().st_ino}"
    return socket.gethostname()


def _machine() -> str:
    """Return a name of this machine: copies of one that was suspended differ in the second part."""
    return f"{_BOOT.read_text().strip()}/{socket.gethostname()}"


def has_ended(name: str | None, here: str | None) -> bool:
    """Return whether the process called ``name`` has certainly ended.

    Args:
        name: what ``process_name`` returned there.
        here: what it returned in this process.
    """
    if name is None or here is None:
        return False
    machine, _, number = name.rpartition("/")
    if machine != here.rpartition("/")[0]:
        return False
    try:
        stat = Path(f"/proc/{int(number)}/stat").read_text()
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False
    # After the name in brackets, which may hold anything. One that its parent has not waited for is
    # a zombie: its memory and its connections are gone.
    return stat.rpartition(")")[2].split()[0] in "ZX"


def interrupt_thread(thread_id: int) -> None:
    """Raise ``KeyboardInterrupt`` in a thread of this process, by its number.

    As Ctrl+C does in the main thread, where a signal also ends a sleep or a wait for input. In
    another thread, or where the script handles Ctrl+C by itself, it comes with the thread's next
    step in Python.
    """
    is_main = thread_id == threading.main_thread().ident
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_main and is_default and hasattr(signal, "pthread_kill"):
        signal.pthread_kill(thread_id, signal.SIGINT)
        return
    error = ctypes.py_object(KeyboardInterrupt)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), error)


def limit_end(limit_s: float) -> None:
    """Have this process end within ``limit_s`` once its script is through.

    Multiprocessing waits there for its children without a limit: for a loader worker, too, that was
    stopped or waits for a disk. No thread of ours is left by then, and Python starts none.
    """
    end = partial(faulthandler.dump_traceback_later, limit_s, exit=True, file=2)
    Finalize(None, end, exitpriority=sys.maxsize)  # before it waits


def end_process(message: str) -> None:
    """End the process from a side thread: the main one is stuck."""
    log = logging.getLogger("evenstep")
    try:
        log.critical(
            "Aborting this process, which is stuck in a collective (stacks below): %s", message
        )
        try:
            faulthandler.dump_traceback()
        except Exception:  # scripts put what is no file in the place of standard error
            faulthandler.dump_traceback(2)
        logging.shutdown()
    finally:
        os._exit(1)
