"""One message as bytes: how long it is, a tag that proves who sent it, its text.

The form of a message and of a greeting is the same in all versions, so that ranks of unlike
versions can tell each other so.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Mapping
from hashlib import blake2b
from typing import NamedTuple, final

from .. import __version__
from ._world_check import refusal

PROTOCOL = 17
"""Version of what ranks say to each other; it grows whenever that changes."""

VERSION = f"{__version__} (protocol {PROTOCOL})"
"""What every rank says of itself first."""

Data = bytes | bytearray

_HEAD = struct.Struct("!I")  # bytes of the text
_COUNT = struct.Struct("!Q")
_LONGEST = 1 << 28  # bytes of a text: what is longer is no message
_TAG_BYTES = 32
_START = _HEAD.size + _TAG_BYTES  # of the text


class ProtocolError(ConnectionError):
    """Ranks run unlike versions of evenstep, or of its protocol."""


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
    """Raise if ranks run unlike versions of evenstep, or of its protocol.

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
