"""Network namespaces, each kept by a file that it is mounted on."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, final

from ._machine import LabUnavailable

Result = TypeVar("Result")

_CLONE_NEWNET = 0x40000000
_MS_BIND = 4096
_MNT_DETACH = 2


@final
@dataclass(frozen=True, slots=True)
class Namespace:
    """A network namespace by the file that holds it; ``nsenter --net=FILE`` goes there too.

    No process has to stay inside for it to last, so it outlives the process that made it.
    """

    path: Path

    def make(self) -> None:
        """Make an empty namespace. Nothing leads out of it.

        Raises:
            LabUnavailable: root is not allowed to here, in a container say.
            OSError: it exists, or the kernel has no namespaces.
        """
        os.close(os.open(self.path, os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0o400))
        try:
            _in_a_thread(self._mount_a_new_one)
        except PermissionError as error:
            message = (
                "Root may not make network namespaces here, as in most containers. Start the "
                "container with `docker run --privileged`, or run on the machine itself."
            )
            raise LabUnavailable(message) from error

    def _mount_a_new_one(self) -> None:
        _call("unshare", _CLONE_NEWNET)
        # The thread's own: /proc/self is the main thread, which has not moved.
        mine = f"/proc/self/task/{threading.get_native_id()}/ns/net".encode()
        _call("mount", mine, os.fsencode(self.path), b"none", _MS_BIND, None)

    def run(self, function: Callable[[], Result]) -> Result:
        """Return what ``function`` returns inside: the sockets it opens are of this namespace.

        It runs in a thread of its own, as only threads can go elsewhere and leave the rest behind.
        """

        def inside() -> Result:
            with self.path.open("rb") as file:
                _call("setns", file.fileno(), _CLONE_NEWNET)
            return function()

        return _in_a_thread(inside)

    def processes(self) -> list[int]:
        """Return the processes inside, by number; this one is never among them."""
        here = self._identity()
        if here is None:
            return []
        numbers = (int(name) for name in os.listdir("/proc") if name.isdecimal())
        return [pid for pid in numbers if pid != os.getpid() and _network_of(pid) == here]

    def kill(self) -> int:
        """Kill the processes inside, one round of it, and return how many there were."""
        here, num_killed = self._identity(), 0
        for pid in self.processes():
            try:
                handle = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            try:
                # Asked again with the handle held: a number may have gone to another process.
                if _network_of(pid) == here:
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                    num_killed += 1
            except ProcessLookupError:
                continue
            finally:
                os.close(handle)
        return num_killed

    def remove(self) -> None:
        """Unmount and delete the file; the namespace goes with the last process inside."""
        if self._identity() is not None:
            _call("umount2", os.fsencode(self.path), _MNT_DETACH)
        self.path.unlink(missing_ok=True)

    def _identity(self) -> tuple[int, int] | None:
        """Return what tells this namespace from others; None where the file holds none."""
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            return None
        mounted = found.st_dev != os.stat(self.path.parent).st_dev
        return (found.st_dev, found.st_ino) if mounted else None


def _network_of(pid: int) -> tuple[int, int] | None:
    try:
        found = os.stat(f"/proc/{pid}/ns/net")
    except OSError:  # it ended, or is ending
        return None
    return found.st_dev, found.st_ino


def _call(name: str, *arguments: object) -> None:
    """Call a function of the C library that returns 0 or sets an error."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _in_a_thread(function: Callable[[], Result]) -> Result:
    """Return or raise what ``function`` does in a fresh thread, which ends with it."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="evenstep-lab")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
