"""What a stranger can do at rank 0's port: connect again and again, drip, forge."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from time import sleep

from evenstep._exchange._wire import Wire, text_of
from evenstep.torch._exchange._sockets import connections


class Flood:
    """Another process that tries to connect to a port as often as it can.

    Attributes:
        num_refused, num_accepted: calls so far, after the end.
    """

    def __init__(self, port: int) -> None:  # the class says it
        self.num_refused = self.num_accepted = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        """End it."""
        said, _ = self._process.communicate()
        self.num_refused, self.num_accepted = map(int, said.split())


def flood(port: int) -> None:
    """Connect until standard input closes; print how many calls were refused, and accepted."""
    closing = threading.Thread(target=sys.stdin.read, daemon=True)
    closing.start()
    num_refused = num_accepted = 0
    while closing.is_alive():
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            num_accepted += 1
        except ConnectionRefusedError:
            num_refused += 1
    print(num_refused, num_accepted)


class Crowd:
    """Connections to a port that say a byte now and then."""

    def __init__(self, port: int) -> None:  # the class says it
        self._port = port
        self._sockets: list[socket.socket] = []
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    def drip(self, number: int, *, every_s: float) -> None:
        """Connect as soon as the port is open, in a thread, and send a byte on each at times."""
        self._thread = threading.Thread(target=self._drip, args=(number, every_s))
        self._thread.start()

    def leave(self) -> int:
        """Close all connections; return how many there were."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        for one in self._sockets:
            one.close()
        number = len(self._sockets)
        self._sockets.clear()
        return number

    def _drip(self, number: int, every_s: float) -> None:
        while not self._closing.is_set() and len(self._sockets) < number:
            try:
                self._sockets.append(socket.create_connection(("127.0.0.1", self._port)))
            except OSError:
                sleep(0.001)
        while not self._closing.wait(every_s):
            for one in self._sockets:
                with suppress(OSError):
                    one.send(b"\0")


def forge(port: int) -> None:
    """Put a message without the right tag into this process' own connection to a port.

    It arrives as one does that was put into the connection on its way.
    """
    text = text_of(b"rank 0 is lost, a stranger says so")
    message = Wire(b"a guess", is_caller=True).head(text) + text.data
    for one in connections():
        if one.ports[1] == port:
            with socket.socket(fileno=os.dup(one.descriptor)) as connection:
                connection.send(message)


if __name__ == "__main__":
    flood(int(sys.argv[1]))
