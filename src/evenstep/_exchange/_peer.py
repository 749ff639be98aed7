"""One connection between rank 0 and another rank: every message arrives once and in order."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress

from ._wire import HEARTBEAT, Data, Text, Wire

_AT_ONCE = getattr(socket, "MSG_DONTWAIT", 0)  # where there is none, sending waits
_MOST_BYTES = 1 << 16  # read at a time
_LAST_S = 5.0  # at the close, for what the connection has not taken yet
CLOSED = "its connection closed: it ended, was killed or cut off"


class Peer:
    """This process' end of one connection, which is made once: a broken one stays broken.

    Nothing here waits for the other end, which may be stopped: what the connection does not take
    at once is the backlog, until ``flush``.

    Args:
        connection: an open socket, which belongs to the peer from now on.
        wire: what authenticates it.
        process: the name of the other process, where it is known.

    Attributes:
        end: why nothing more will come over the connection; empty while more may come.
    """

    def __init__(
        self, connection: socket.socket, wire: Wire, *, process: str | None = None
    ) -> None:
        self.connection = connection
        self._wire = wire
        self.process = process
        self.end = ""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._failure = ""  # of sending
        self._backlog = bytearray()
        self._buffer = bytearray()

    def send(self, text: Text) -> bool:
        """Send a message from any thread; nothing over a connection that broke.

        Nothing in a forked child: the connection is its parent's.

        Returns:
            Whether there is a backlog.
        """
        if self._pid != os.getpid():
            return False
        with self._lock:
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

    def send_rest(self) -> None:
        """Send the backlog before the close, and wait some seconds for it."""
        with self._lock:
            if self._backlog:
                self.connection.settimeout(_LAST_S)
                self._flush(flags=0)

    def receive(self) -> list[Data] | None:
        """Read what has come; return its messages, or None where nothing of it is whole yet.

        Call it where the connection can be read: it would block. See ``end`` then.
        """
        data = self._read()
        if self._buffer:
            self._buffer += data
        whole = self._buffer or data
        messages: list[Data] = []
        at = 0
        try:
            while at < len(whole) and (frame := self._wire.take(whole, at)) is not None:
                text, at = frame
                if text:
                    messages.append(text)
        except ValueError as error:
            self.end = f"a message over its connection was refused: {error}"
        if self._buffer:
            del self._buffer[:at]
        elif at < len(data):
            self._buffer += data[at:]
        return messages if at else None

    def hang_up(self) -> None:
        """Close the connection, also where forked processes such as loader workers hold it open."""
        with self._lock:
            self._failure = CLOSED
            self._backlog.clear()
            hang_up(self.connection)

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def _read(self) -> bytes:
        """Return what has come; nothing at the end."""
        try:
            if not (data := self.connection.recv(_MOST_BYTES)):
                self.end = self._failure or CLOSED
            return data
        except OSError as error:
            self.end = _in_words(error)
            return b""

    def _write(self, text: Text) -> None:
        if self._failure:
            return
        data = self._wire.head(text) + text.data
        self._backlog += data if self._backlog else data[self._put(data, _AT_ONCE) :]
        if self._backlog:
            self._flush()

    def _flush(self, flags: int = _AT_ONCE) -> None:
        while self._backlog and (num_bytes := self._put(self._backlog, flags)):
            del self._backlog[:num_bytes]

    def _put(self, data: Data, flags: int) -> int:
        """Return how many bytes the connection took; a broken one takes and loses them all."""
        try:
            return self.connection.send(data, flags)
        except BlockingIOError:
            return 0
        except OSError as error:
            # Perhaps in the middle of a message: nothing may follow.
            self._failure = _in_words(error)
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)  # so that the reading side meets it
            return len(data)


def hang_up(connection: socket.socket) -> None:
    """Close a socket for good, also where forked processes such as loader workers hold it open."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _in_words(error: OSError) -> str:
    """Return how a connection ended."""
    if isinstance(error, BrokenPipeError):  # the other end had closed it
        return CLOSED
    return f"{CLOSED} ({error.strerror or error})"
