"""One connection between rank 0 and another rank: every message arrives once and in order.

A message goes as its length, a tag that proves who sent it, and its text. The form of a message and
of a greeting is the same in all versions, so that ranks of different versions can say so.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from typing import NamedTuple, final

from .. import __version__
from ._world_check import refusal

PROTOCOL = 18
"""Version of what ranks say to each other; it grows whenever that changes."""

VERSION = f"{__version__} (protocol {PROTOCOL})"
"""What every rank says of itself first."""

Data = bytes | bytearray

_HEAD = struct.Struct("!I")  # bytes of the text
_COUNT = struct.Struct("!Q")
_LONGEST = 1 << 28  # bytes of a text: what is longer is no message
_TAG_BYTES = 32
_START = _HEAD.size + _TAG_BYTES  # of the text

_AT_ONCE = getattr(socket, "MSG_DONTWAIT", 0)  # where there is none, sending waits
_MOST_BYTES = 1 << 16  # read at a time
_LAST_S = 5.0  # at the close, for what the connection has not taken yet
CLOSED = "its connection closed: it ended, was killed or cut off"


class ProtocolError(ConnectionError):
    """Ranks run different versions of evenstep, or of its protocol."""


class Text(NamedTuple):
    """A message, ready to be sent to any number of ranks."""

    data: bytes
    digest: bytes


Frame = tuple[Data, int]
"""What has arrived: the text of a message, empty for a heartbeat, and where the next begins."""


def text_of(data: bytes) -> Text:
    """Return a message that is to be sent."""
    return Text(data, _digest(data))


HEARTBEAT = Text(b"", b"")


@final
class Wire:
    """One end of an authenticated connection: gives each message its tag, and checks each tag.

    A tag is a keyed BLAKE2b (RFC 7693) over the message's number on this connection, its header
    and the BLAKE2b of its text, under a key that belongs to this connection and direction. So a
    message is refused if it was forged, changed, repeated, reordered, sent back, or taken from
    another connection, and so is the message after one that was left out. Nothing is encrypted.
    Rank 0 tags and checks one message of each rank in a step: BLAKE2b takes a third of the time
    of an HMAC-SHA256.

    Args:
        key: known to the two ends alone.
        is_caller: whether this end made the connection.
    """

    def __init__(self, key: bytes, *, is_caller: bool) -> None:
        up, down = (
            blake2b(key=hmac.digest(key, way, "sha256"), digest_size=_TAG_BYTES)
            for way in (b"to rank 0", b"from rank 0")
        )
        self._mine, self._theirs = (up, down) if is_caller else (down, up)
        self._num_tagged = self._num_checked = 0

    def head(self, text: Text) -> bytes:
        """Return what goes before a text: messages are sent in the order of these calls."""
        head = _HEAD.pack(len(text.data))
        tag = _tag(self._mine, self._num_tagged, head, text.digest)
        self._num_tagged += 1
        return head + tag

    def take(self, data: Data, at: int = 0, *, longest: int = _LONGEST) -> Frame | None:
        """Return the message that begins at ``data[at]``; None if it is not complete.

        Raises:
            ValueError: it is not authentic, or longer than ``longest``. Close the connection.
        """
        start = at + _START
        if len(data) < start:
            return None
        (length,) = _HEAD.unpack_from(data, at)
        end = start + length
        if length > longest:
            raise ValueError(f"it claims to have {length} bytes, and {longest} are the most")
        if len(data) < end:
            return None
        text, tagged = data[start:end], at + _HEAD.size
        digest = _digest(text) if text else HEARTBEAT.digest
        tag = _tag(self._theirs, self._num_checked, data[at:tagged], digest)
        if not hmac.compare_digest(tag, data[tagged:start]):
            raise ValueError("it is forged, changed, repeated or out of order")
        self._num_checked += 1
        return text, end


def num_missing(buffer: Data) -> int:
    """Return how many bytes of the first message are still to come, as far as that is known."""
    if len(buffer) < _START:
        return _START - len(buffer)
    return max(0, _START + int(_HEAD.unpack_from(buffer)[0]) - len(buffer))


def check_versions(versions: Mapping[int, str]) -> None:
    """Raise if ranks run different versions of evenstep, or of its protocol.

    Args:
        versions: by rank, as ``VERSION`` has them.

    Raises:
        ProtocolError: they do; the message names them all.
    """
    if len(set(versions.values())) > 1:
        found = [versions.get(rank) for rank in range(max(versions) + 1)]
        remedy = "Install the same one on all hosts."
        raise ProtocolError(refusal("The version of evenstep", found, remedy))


def _digest(text: Data) -> bytes:
    return blake2b(text, digest_size=_TAG_BYTES).digest()


def _tag(keyed: blake2b, number: int, head: Data, digest: bytes) -> bytes:
    tagged = keyed.copy()
    tagged.update(_COUNT.pack(number) + head + digest)
    return tagged.digest()


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
