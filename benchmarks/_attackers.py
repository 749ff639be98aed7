"""What a stranger can do at rank 0's port: stay silent, drip, listen in, repeat and forge."""

from __future__ import annotations

import os
import resource
import socket
import struct
import threading
from contextlib import suppress
from time import sleep

from evenstep._exchange._wire import Wire, encode
from evenstep.torch._exchange._sockets import connections

_ALL_PACKETS = 0x0003
_CHALLENGE = 16  # bytes that rank 0 sends to everyone who connects


class Crowd:
    """Connections to a port that say nothing, or a byte now and then."""

    def __init__(self, port: int) -> None:  # the class says it
        self._port = port
        self._sockets: list[socket.socket] = []
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    def connect(self, number: int) -> None:
        """Make so many connections."""
        for _ in range(number):
            self._sockets.append(socket.create_connection(("127.0.0.1", self._port)))

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
                self.connect(1)
            except OSError:
                sleep(0.001)
        while not self._closing.wait(every_s):
            for one in self._sockets:
                with suppress(OSError):
                    one.send(b"\0")


class Sniffer:
    """Keeps what goes to a port over the loopback. Root alone may."""

    def __init__(self, port: int) -> None:  # the class says it
        self._port = port
        self._packets: dict[int, dict[int, bytes]] = {}  # by port of the sender and number
        self._socket = socket.socket(
            socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(_ALL_PACKETS)
        )
        self._socket.bind(("lo", 0))
        self._socket.settimeout(0.1)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def heard(self) -> bytes:
        """Return what the first connection that sent anything has sent so far."""
        packets = dict(next(iter(self._packets.values()), {}))
        return b"".join(packets[number] for number in sorted(packets))

    def close(self) -> None:
        """Listen no more."""
        self._closing.set()
        self._thread.join()
        self._socket.close()

    def _listen(self) -> None:
        while not self._closing.is_set():
            with suppress(TimeoutError):
                packet = self._socket.recv(1 << 16)
                start = 4 * (packet[0] & 15)  # of the TCP header
                source, target, number = struct.unpack_from("!HHI", packet, start)
                if packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_TCP or target != self._port:
                    continue
                data = packet[start + 4 * (packet[start + 12] >> 4) :]
                if data:
                    self._packets.setdefault(source, {})[number] = data


def replay(port: int, heard: bytes) -> bool:
    """Send what was heard over a connection of one's own; return whether it was refused."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        answer = b""
        with suppress(ConnectionError):
            connection.sendall(heard)
            while data := connection.recv(4096):
                answer += data
    return len(answer) <= _CHALLENGE


def forge(port: int) -> None:
    """Put a message without the right tag into this process' own connection to a port.

    It arrives as one does that was put into the connection on its way.
    """
    text = encode({"lost": 0, "problem": "a stranger says so"})
    message = Wire(b"a guess", is_caller=True).head(text, 0) + text.data
    for one in connections():
        if one.ports[1] == port:
            with socket.socket(fileno=os.dup(one.descriptor)) as connection:
                connection.send(message)


def num_descriptors(pid: int) -> int:
    """Return how many files and sockets a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


class Most:
    """The largest number of descriptors that a process has while this is open."""

    def __init__(self, pid: int) -> None:  # the class says it
        self._pid = pid
        self.number = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def close(self) -> int:
        """Look no more; return the number."""
        self._closing.set()
        self._thread.join()
        return self.number

    def _look(self) -> None:
        with suppress(FileNotFoundError):
            while not self._closing.wait(0.005):
                self.number = max(self.number, num_descriptors(self._pid))
