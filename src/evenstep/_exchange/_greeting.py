"""How a rank and rank 0 make sure of each other when a connection is made.

Rank 0 sends a random challenge; the rank answers with random bytes of its own and its greeting;
rank 0 welcomes it. The greeting and the welcome are the first messages of the connection. Their
key is made from the run's token and both random texts, so a greeting is good for one connection.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
from typing import NamedTuple, final

from ._wire import VERSION, Frame, Wire, num_missing, text_of

_NONCE = 16  # bytes of each random text
_LONGEST = 4096  # bytes of a greeting


class Greeting(NamedTuple):
    """What a rank says first.

    Attributes:
        rank: that of the caller.
        process: the name of its process, where it has one.
        version: of evenstep and of the protocol, as ``VERSION`` has them.
    """

    rank: int
    process: str | None
    version: str = VERSION


@final
class Newcomer:
    """A connection to rank 0 whose other end is not known yet.

    Args:
        connection: just accepted.
        token: what the other end has to know.

    Raises:
        OSError: the connection is gone again.
    """

    def __init__(self, connection: socket.socket, token: str) -> None:
        self.connection = connection
        self._token = token
        self._challenge = secrets.token_bytes(_NONCE)
        self._buffer = bytearray()
        self._wire: Wire | None = None
        connection.setblocking(False)
        connection.send(self._challenge)

    def has_answered(self) -> bool:
        """Tell whether there is something to read."""
        try:
            return bool(self.connection.recv(1, socket.MSG_PEEK))
        except OSError:  # nothing yet, or it is gone
            return False

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
        if not data:
            raise ValueError("it said no more")
        self._buffer += data
        if self._wire is None:
            if len(self._buffer) < _NONCE:
                return None
            nonce = bytes(self._buffer[:_NONCE])
            self._wire = Wire(_key(self._token, self._challenge, nonce), is_caller=False)
        frame = self._wire.take(self._buffer, _NONCE, longest=_LONGEST)
        return None if frame is None else _greeting(frame)

    def welcome(self) -> tuple[socket.socket, Wire]:
        """Answer the greeting; return the connection and its wire, ready to use."""
        assert self._wire is not None
        text = text_of(json.dumps({"version": VERSION}).encode())
        self.connection.settimeout(None)
        self.connection.sendall(self._wire.head(text) + text.data)
        return tune(self.connection), self._wire


def greet(connection: socket.socket, token: str, greeting: Greeting) -> tuple[Wire, str]:
    """Greet rank 0; return the connection's wire and the version that rank 0 welcomes with.

    Raises:
        ValueError: the other end is not rank 0.
        ConnectionError: the connection closed.
    """
    challenge, nonce = bytearray(), secrets.token_bytes(_NONCE)
    while len(challenge) < _NONCE:
        challenge += _received(connection, _NONCE - len(challenge))
    wire = Wire(_key(token, bytes(challenge), nonce), is_caller=True)
    text = text_of(json.dumps(greeting._asdict()).encode())
    connection.sendall(nonce + wire.head(text) + text.data)
    buffer = bytearray()
    while (frame := wire.take(buffer, longest=_LONGEST)) is None:
        buffer += _received(connection, num_missing(buffer))  # and nothing of what follows
    return wire, str(json.loads(frame[0])["version"])


def tune(connection: socket.socket) -> socket.socket:
    """Return the connection, ready for messages."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _key(token: str, challenge: bytes, nonce: bytes) -> bytes:
    return hmac.digest(token.encode(), b"evenstep" + challenge + nonce, "sha256")


def _greeting(frame: Frame) -> Greeting:
    """Return what an authentic greeting says; newer versions may say more."""
    said = json.loads(frame[0])
    return Greeting(int(said["rank"]), said["process"], str(said["version"]))


def _received(connection: socket.socket, most: int) -> bytes:
    data = connection.recv(most)
    if not data:
        raise ConnectionError("the connection closed")
    return data
