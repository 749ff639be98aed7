"""What a rank says first over a connection to rank 0, and what rank 0 answers."""

from __future__ import annotations

import hmac
import json
import socket
import struct
from dataclasses import dataclass
from typing import Any

_LENGTH = struct.Struct("!I")
_LONGEST = 4096  # bytes of a greeting; who sends more is a stranger


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a rank says first.

    Attributes:
        rank: who it is.
        num_received: messages it has received from rank 0 over earlier connections.
        process: the name of its process, where it has one.
    """

    rank: int
    num_received: int
    process: str | None


class Newcomer:
    """A connection that has not said yet whose it is.

    Args:
        connection: just accepted.
        token: what it has to know.
    """

    def __init__(self, connection: socket.socket, token: str) -> None:
        self.connection = connection
        self._token = token
        self._buffer = bytearray()
        connection.setblocking(False)

    def read(self) -> Greeting | None:
        """Read what is there; return the greeting, or None if it is not complete.

        Raises:
            ValueError: a stranger. Close the connection.
        """
        try:
            data = self.connection.recv(_LONGEST)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ValueError(str(error)) from error
        self._buffer += data
        if not data or len(self._buffer) > _LONGEST:
            raise ValueError("no greeting")
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > _LONGEST:
            raise ValueError("no greeting")
        if len(self._buffer) < _LENGTH.size + length:
            return None
        return _greeting(bytes(self._buffer[_LENGTH.size :]), self._token)

    def welcome(self, num_received: int) -> socket.socket:
        """Answer the greeting and return the connection, ready to use.

        Args:
            num_received: messages received from that rank over earlier connections.
        """
        self.connection.settimeout(None)
        send(self.connection, {"received": num_received})
        return tune(self.connection)


def _greeting(text: bytes, token: str) -> Greeting:
    try:
        said = json.loads(text)
        if not hmac.compare_digest(said["token"].encode(), token.encode()):
            raise ValueError("the token is another one")
        return Greeting(int(said["rank"]), int(said["received"]), said["process"])
    except Exception as error:  # strangers send anything: nested too deep, no object at all
        raise ValueError("no greeting") from error


def send(connection: socket.socket, value: dict[str, Any]) -> None:
    """Send a value."""
    text = json.dumps(value).encode()
    connection.sendall(_LENGTH.pack(len(text)) + text)


def receive(connection: socket.socket) -> Any:
    """Wait for a value and return it.

    Raises:
        ValueError: it is too long for one.
        ConnectionError: the connection closed.
    """
    (length,) = _LENGTH.unpack(_read_exactly(connection, _LENGTH.size))
    if length > _LONGEST:
        raise ValueError("no greeting")
    return json.loads(_read_exactly(connection, length))


def _read_exactly(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = connection.recv(length - len(data))
        if not more:
            raise ConnectionError("the connection closed")
        data += more
    return data


def tune(connection: socket.socket) -> socket.socket:
    """Return the connection, ready for messages."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
