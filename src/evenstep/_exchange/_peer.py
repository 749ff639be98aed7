"""One connection that may break and be made again: every message arrives once and in order."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

Message = dict[str, Any]

# Length of the JSON text that follows, and messages received so far. Length 0 is a heartbeat.
_HEADER = struct.Struct("!IQ")
_LAST_WORD = 0xFFFFFFFF  # in the place of a length: the connection will be closed on purpose
_AT_ONCE = getattr(socket, "MSG_DONTWAIT", 0)  # where there is none, sending waits
_ENCODE = json.JSONEncoder(check_circular=False, separators=(",", ":")).encode
_LAST_S = 5.0  # at the close, for what the connection has not taken yet


def encode(message: Message) -> bytes:
    """Return ``message`` as it goes over a connection."""
    return _ENCODE(message).encode()


class Peer:
    """This process' end of one connection, with what the other end may not have got yet.

    Both ends count the messages they have received, and say so with everything they send. What
    is sent is kept until the other end has counted it, and sent again over the next connection
    if this one breaks.

    Nothing here waits for the other end, which may be stopped: what the connection does not take
    at once is the backlog, until ``flush``.

    Args:
        connection: an open socket, which belongs to the peer from now on.
        process: the name of the other process, where it is known.
    """

    def __init__(self, connection: socket.socket, process: str | None = None) -> None:
        self.connection = connection
        self.process = process
        self.is_leaving = False  # it said its last word
        self.num_received = 0
        self._lock = threading.Lock()
        self._is_broken = False
        self._unsure: deque[bytes] = deque()
        self._num_sure = 0
        self._backlog = bytearray()
        self._buffer = bytearray()

    def send(self, text: bytes) -> bool:
        """Send a message from any thread, now or, if the connection is broken, over the next.

        Returns:
            Whether there is a backlog.
        """
        with self._lock:
            self._unsure.append(text)
            self._write(len(text), text)
            return bool(self._backlog)

    def flush(self) -> bool:
        """Send what the connection takes of the backlog; return whether any is left."""
        with self._lock:
            self._flush()
            return bool(self._backlog)

    def beat(self) -> None:
        """Send a heartbeat; a backlog is one."""
        with self._lock:
            if not self._backlog:
                self._write(0)

    def say_last_word(self) -> None:
        """Say that the end of this connection is none to repair, after everything else."""
        with self._lock:
            if not self._is_broken:
                self.connection.settimeout(_LAST_S)
                self._write(_LAST_WORD, flags=0)

    def receive(self) -> Iterator[Message] | None:
        """Read what has come and return an iterator over its messages; None at the end.

        Call it where the connection can be read: it would block.
        """
        try:
            data = self.connection.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            return None
        self._buffer += data
        return self._messages()

    def break_off(self) -> None:
        """Close a connection that broke; messages wait for the next one."""
        with self._lock:
            self._is_broken = True
            self._backlog.clear()
            self.connection.close()

    def resume(self, connection: socket.socket, num_arrived: int) -> None:
        """Go on over a new connection.

        Args:
            connection: the new one.
            num_arrived: how many messages the other end has received over all before.
        """
        with self._lock:
            self.connection.close()
            self._buffer.clear()  # the half of a message, which will come again as a whole
            self.connection = connection
            self._is_broken = False
            self._forget(num_arrived)
            for text in tuple(self._unsure):
                self._write(len(text), text)

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def _write(self, length: int, text: bytes = b"", *, flags: int = _AT_ONCE) -> None:
        if not self._is_broken:
            self._backlog += _HEADER.pack(length, self.num_received) + text
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

    def _messages(self) -> Iterator[Message]:
        buffer = self._buffer
        while len(buffer) >= _HEADER.size:
            length, num_arrived = _HEADER.unpack_from(buffer)
            if length == _LAST_WORD:
                self.is_leaving = True
                length = 0
            end = _HEADER.size + length
            if len(buffer) < end:
                return
            text = bytes(buffer[_HEADER.size : end])
            del buffer[:end]
            self._forget(num_arrived)
            if text:
                self.num_received += 1
                yield json.loads(text)

    def _forget(self, num_arrived: int) -> None:
        """Let go of what the other end has."""
        while self._num_sure < num_arrived and self._unsure:
            self._unsure.popleft()
            self._num_sure += 1
