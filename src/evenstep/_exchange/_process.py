"""Whether another process on this machine has ended; how to interrupt and to end this one."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path

_BOOT, _NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
_NETWORK = Path("/proc/self/ns/net")


def process_name() -> str | None:
    """Return a name of this process by which others on its machine can find it.

    None where there is no way to tell, as outside Linux.
    """
    with suppress(OSError):
        # Containers number their processes anew: a number means nothing outside of its namespace.
        return f"{_machine()}/{_NAMESPACE.stat().st_ino}/{os.getpid()}"
    return None


def network_name() -> str:
    """Return a name that processes share which reach each other by the loopback.

    Host names alone do not tell: two machines may have the same one, and containers on one machine
    have networks of their own. Where there is nothing else, as outside Linux, the host name it is.
    """
    with suppress(OSError):
        return f"{_machine()}/{_NETWORK.stat().st_ino}"
    return socket.gethostname()


def _machine() -> str:
    """Return a name of this machine: copies of one that was suspended differ in the second part."""
    return f"{_BOOT.read_text().strip()}/{socket.gethostname()}"


def has_ended(name: str | None, here: str | None) -> bool:
    """Tell whether the process called ``name`` has certainly ended.

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
