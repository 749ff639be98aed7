"""One connection that may break and be made again: every message arrives once and in order."""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from contextlib import suppress
from typing import Any

from ._wire import HEARTBEAT, Data, Text, Wire, decode

_AT_ONCE = getattr(socket, "MSG_DONTWAIT", 0)  # where there is none, sending waits
_MOST_BYTES = 1 << 16  # read at a time
_LAST_S = 5.0  # at the close, for what the connection has not taken yet


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

    Attributes:
        is_leaving: whether the other end has said that it closes the connection on purpose.
        is_over: whether nothing more will come over the connection.
        refused: what was wrong with a message, if that is why; else empty.
    """

    def __init__(
        self, connection: socket.socket, wire: Wire, *, process: str | None = None
    ) -> None:
        self.connection = connection
        self._wire = wire
        self.process = process
        self.is_leaving = False
        self.is_over = False
        self.refused = ""
        self.num_received = 0
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._is_broken = False
        self._unsure: deque[Text] = deque()
        self._num_sure = 0
        self._backlog = bytearray()
        self._buffer = bytearray()

    def send(self, text: Text) -> bool:
        """Send a message from any thread, now or, if the connection is broken, over the next.

        Nothing in a forked child: the connection is its parent's.

        Returns:
            Whether there is a backlog.
        """
        if self._pid != os.getpid():
            return False
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

    def receive(self) -> list[Any] | None:
        """Read what has come; return its messages, or None where nothing of it is whole yet.

        Call it where the connection can be read: it would block. See ``is_over`` then.
        """
        try:
            data = self.connection.recv(_MOST_BYTES)
        except OSError:
            data = b""
        self.is_over = not data
        if self._buffer:
            self._buffer += data
        whole = self._buffer or data
        messages, at = [], 0
        try:
            while at < len(whole) and (frame := self._wire.take(whole, at)) is not None:
                text, num_arrived, is_last, at = frame
                self.is_leaving |= is_last
                self._forget(num_arrived)
                if text:
                    self.num_received += 1
                    messages.append(decode(text))
        except ValueError as error:
            self.refused, self.is_over = str(error), True
        if self._buffer:
            del self._buffer[:at]
        elif at < len(data):
            self._buffer += data[at:]
        return messages if at else None

    def break_off(self) -> None:
        """Close a connection that broke; messages wait for the next one."""
        with self._lock:
            self._is_broken = True
            self._backlog.clear()
            hang_up(self.connection)

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
            self._is_broken = self.is_over = False
            self.refused = ""
            self._forget(num_arrived)
            for text in tuple(self._unsure):
                self._write(text)

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def _write(self, text: Text, *, is_last: bool = False, flags: int = _AT_ONCE) -> None:
        if self._is_broken:
            return
        data = self._wire.head(text, self.num_received, is_last=is_last) + text.data
        self._backlog += data if self._backlog else data[self._put(data, flags) :]
        if self._backlog:
            self._flush(flags)

    def _flush(self, flags: int = _AT_ONCE) -> None:
        while self._backlog and (num_bytes := self._put(self._backlog, flags)):
            del self._backlog[:num_bytes]

    def _put(self, data: Data, flags: int) -> int:
        """Return how many bytes the connection took; a broken one takes and loses them all."""
        try:
            return self.connection.send(data, flags)
        except BlockingIOError:
            return 0
        except OSError:
            self._is_broken = True  # perhaps in the middle of a message: nothing may follow
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)  # so that the reading side meets it
            return len(data)

    def _forget(self, num_arrived: int) -> None:
        """Let go of what the other end has."""
        while self._num_sure < num_arrived and self._unsure:
            self._unsure.popleft()
            self._num_sure += 1


def hang_up(connection: socket.socket) -> None:
    """Close a socket for good, also where forked processes such as loader workers hold it open."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
