"""How a rank and rank 0 make sure of each other when a connection is made.

Rank 0 sends a random challenge; the rank answers with random bytes of its own and its greeting;
rank 0 welcomes it. The greeting and the welcome are the first messages of the connection. Their
key is made from the run's token and both random texts, so a greeting is good for one connection.
Until then a connection may be a stranger's: few are held at a time, each for seconds.
"""

from __future__ import annotations

import hmac
import json
import logging
import secrets
import selectors
import socket
from contextlib import suppress
from typing import NamedTuple, final

from ._wire import VERSION, Frame, Wire, num_missing, text_of

_NONCE = 16  # bytes of each random text
_LONGEST = 4096  # bytes of a greeting

_STRANGERS = 64  # beside as many newcomers as there are ranks
_GREETING_S = 5.0


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
class PendingPeer:
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
        """Return whether there is something to read."""
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


class Acceptor:
    """Lets connections in that greet with the run's token, and keeps strangers few.

    Every newcomer has five seconds to greet, and all are read at the same time, so a stranger
    that sends nothing, or a byte now and then, delays no rank. Where strangers are more than 64,
    the oldest newcomer is turned away for the next one. One whose answer waits to be read is kept:
    in a flood, that is how a rank comes through.

    Args:
        token: what a greeting has to know.
        selector: reports when a newcomer can be read; the newcomer is the key's ``data``.
        num_ranks: how many may come at the same time.

    Attributes:
        problem: why a connection could not be accepted, as where too many files are open.
    """

    def __init__(self, token: str, selector: selectors.BaseSelector, *, num_ranks: int) -> None:
        self._token = token
        self._selector = selector
        self._most = _STRANGERS + num_ranks
        self._since_s: dict[PendingPeer, float] = {}  # the oldest first
        self._paused: selectors.SelectorKey | None = None
        self.problem: OSError | None = None

    def accept(self, server: socket.socket, now_s: float) -> None:
        """Accept the connections that wait, and send each its challenge."""
        for number in range(self._most):
            try:
                connection, _ = server.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if number == 0:  # later ones may be due to what was just accepted
                    self._cannot_accept(server, error)
                return
            try:
                newcomer = PendingPeer(connection, self._token)
            except OSError:
                connection.close()
                continue
            self._since_s[newcomer] = now_s
            self._selector.register(connection, selectors.EVENT_READ, newcomer)
            if len(self._since_s) > self._most:
                self._make_room("there are too many")

    def read(self, newcomer: PendingPeer) -> Greeting | None:
        """Return what a newcomer says; None if it has not said all, or was turned away."""
        try:
            return newcomer.read()
        except Exception as error:  # strangers send anything
            self.turn_away(newcomer, str(error))
            return None

    def let_in(self, newcomer: PendingPeer) -> tuple[socket.socket, Wire] | None:
        """Welcome a newcomer that has greeted; return its connection, or None if that broke.

        It is no longer read here.
        """
        try:
            connected = newcomer.welcome()
        except OSError as error:
            self.turn_away(newcomer, str(error))
            return None
        del self._since_s[newcomer]
        self._forget(newcomer)
        return connected

    def turn_away(self, newcomer: PendingPeer, reason: str) -> None:
        """Close the connection of a newcomer."""
        logging.getLogger("evenstep").debug("A connection to rank 0 was refused: %s.", reason)
        if self._since_s.pop(newcomer, None) is not None:
            self._forget(newcomer)
        newcomer.connection.close()

    def clear(self, now_s: float) -> None:
        """Turn newcomers away that have had their time to greet; accept again after a problem."""
        if self._paused is not None:
            paused, self._paused = self._paused, None
            self._selector.register(paused.fileobj, paused.events, paused.data)
        for newcomer, since_s in tuple(self._since_s.items()):
            if now_s - since_s <= _GREETING_S:
                return
            self.turn_away(newcomer, f"it did not greet within {_GREETING_S:g} s")

    def close(self) -> None:
        """Turn all newcomers away."""
        for newcomer in tuple(self._since_s):
            self.turn_away(newcomer, "all ranks have connected")

    def _make_room(self, reason: str) -> None:
        """Turn the oldest newcomer away of those that have said nothing, if there are any."""
        silent = (one for one in self._since_s if not one.has_answered())
        self.turn_away(next(silent, next(iter(self._since_s))), reason)

    def _cannot_accept(self, server: socket.socket, error: OSError) -> None:
        """Make room where too many files are open; with none to make, look again in a while."""
        if self._since_s:
            self._make_room(str(error))
        else:
            self.problem, self._paused = error, self._selector.unregister(server)

    def _forget(self, newcomer: PendingPeer) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(newcomer.connection)
