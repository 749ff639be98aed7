"""One connection that may break and be made again: every message arrives once and in order."""

from __future__ import annotations

import json
import socket
import threading
from collections import deque
from contextlib import suppress
from typing import NamedTuple

from ._wire import HEARTBEAT, Message, Text, Wire

_AT_ONCE = getattr(socket, "MSG_DONTWAIT", 0)  # where there is none, sending waits
_LAST_S = 5.0  # at the close, for what the connection has not taken yet


class Arrived(NamedTuple):
    """What came over a connection.

    Attributes:
        messages: in order.
        is_alive: whether anything authentic came, be it a heartbeat.
        refused: what was wrong with a message after those; empty where nothing was.
        is_closed: whether the other end has closed the connection.
    """

    messages: list[Message]
    is_alive: bool = False
    refused: str = ""
    is_closed: bool = False


class Peer:
    """This process' end of one connection, with what the other end may not have got yet.

    Both ends count the messages they have received, and say so with everything they send. What
    is sent is kept until the other end has counted it, and sent again over the next connection
    if this one breaks.

    Nothing here waits for the other end, which may be stopped: what the connection does not take
    at once is the backlog, until ``flush``.

    Args:
        connection: an open socket, which belongs to the peer from now on.
        wire: what authenticates it.
        process: the name of the other process, where it is known.
    """

    def __init__(
        self, connection: socket.socket, wire: Wire, *, process: str | None = None
    ) -> None:
        self.connection = connection
        self._wire = wire
        self.process = process
        self.is_leaving = False  # it said its last word
        self.num_received = 0
        self._lock = threading.Lock()
        self._is_broken = False
        self._unsure: deque[Text] = deque()
        self._num_sure = 0
        self._backlog = bytearray()
        self._buffer = bytearray()

    def send(self, text: Text) -> bool:
        """Send a message from any thread, now or, if the connection is broken, over the next.

        Returns:
            Whether there is a backlog.
        """
        with self._lock:
            self._unsure.append(text)
            self._write(text)
            return bool(self._backlog)

    def flush(self) -> bool:
        """Send what the connection takes of the backlog; return whether any is left."""
        with self._lock:
            self._flush()
            return bool(self._backlog)

    def beat(self) -> bool:
        """Send a heartbeat; a backlog is one. Return whether there is a backlog."""
        with self._lock:
            if not self._backlog:
                self._write(HEARTBEAT)
            return bool(self._backlog)

    def say_last_word(self) -> None:
        """Send what is left, and that this connection ends on purpose and is not to be repaired."""
        with self._lock:
            if not self._is_broken:
                self.connection.settimeout(_LAST_S)
                self._write(HEARTBEAT, is_last=True, flags=0)

    def receive(self) -> Arrived:
        """Read what has come. Call it where the connection can be read: it would block."""
        try:
            data = self.connection.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            return Arrived([], is_closed=True)
        self._buffer += data
        messages: list[Message] = []
        is_alive = False
        try:
            while (frame := self._wire.take(self._buffer)) is not None:
                is_alive = True
                self.is_leaving |= frame.is_last
                self._forget(frame.num_received)
                if frame.text:
                    self.num_received += 1
                    messages.append(json.loads(frame.text))
        except ValueError as error:
            return Arrived(messages, is_alive, refused=str(error))
        return Arrived(messages, is_alive)

    def break_off(self) -> None:
        """Close a connection that broke; messages wait for the next one."""
        with self._lock:
            self._is_broken = True
            self._backlog.clear()
            self.connection.close()

    def resume(self, connection: socket.socket, wire: Wire, num_arrived: int) -> None:
        """Go on over a new connection.

        Args:
            connection: the new one.
            wire: what authenticates it.
            num_arrived: how many messages the other end has received over all before.
        """
        with self._lock:
            self.connection.close()
            self._buffer.clear()  # the half of a message, which will come again as a whole
            self.connection, self._wire = connection, wire
            self._is_broken = False
            self._forget(num_arrived)
            for text in tuple(self._unsure):
                self._write(text)

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def _write(self, text: Text, *, is_last: bool = False, flags: int = _AT_ONCE) -> None:
        if not self._is_broken:
            self._backlog += self._wire.head(text, self.num_received, is_last=is_last) + text.data
            self._flush(flags)

    def _flush(self, flags: int = _AT_ONCE) -> None:
        try:
            while self._backlog:
                del self._backlog[: self.connection.send(self._backlog, flags)]
        except BlockingIOError:
            return
        except OSError:
            self._is_broken = True  # perhaps in the middle of a message: nothing may follow
            self._backlog.clear()
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)  # so that the reading side meets it

    def _forget(self, num_arrived: int) -> None:
        """Let go of what the other end has."""
        while self._num_sure < num_arrived and self._unsure:
            self._unsure.popleft()
            self._num_sure += 1
