"""A star of TCP connections around rank 0: small messages, heartbeats, and who fell silent.

A message goes as its length, a tag that proves who sent it, and its text: every one arrives once
and in order. The form of a message and of a greeting is the same in all versions, so that ranks of
different versions can say so.

Why not the process group: gloo names only a port when a peer dies and nothing at all when one is
stopped, its receives cannot be given up without breaking the group, and a group's life ends with
`destroy_process_group`. A socket per peer says at once which peer closed it.
"""

from __future__ import annotations

import hmac
import math
import os
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from hashlib import blake2b
from time import monotonic
from typing import Any, NamedTuple, Protocol, final

from .. import __version__
from ._internal import say
from ._threads import has_ended, process_name
from ._world_check import refusal

PROTOCOL = 19
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


_FLUSH_S = 0.002  # between two looks whether a connection takes more
_JOIN_S = 10.0  # at the close, for a policy that does not come to an end
_SILENT = "stopped, hung or cut off (if it was only slow, raise `Runtime(deadline_s=...)`)"


class Receiver(Protocol):
    """What a channel reports to its owner, from the channel's thread."""

    def received(self, peer: int, message: Data) -> None:
        """Take a message from ``peer``."""

    def lost(self, peer: int, problem: str) -> None:
        """Take notice that ``peer`` is gone or fell silent; called once for each."""

    def tick(self) -> None:
        """Do what is due now and then; called about every heartbeat."""


class StarChannel:
    """Sends and receives messages between rank 0 and all other ranks.

    One daemon thread reads the connections and sends a heartbeat on each every ``heartbeat_s``.
    A peer that has sent nothing for ``deadline_s`` counts as lost: so a stopped process is
    noticed as well as a dead one. A pause of this process itself is no silence of the others.

    A peer whose connection breaks is lost at once. TCP itself gets over a link that is down for
    some seconds.

    Args:
        peers: the connection with each, by its rank. They belong to the channel from now on.
        heartbeat_s: seconds between two heartbeats, positive.
        deadline_s: seconds of silence after which a peer counts as lost, more than
            ``heartbeat_s``.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        peers: dict[int, Peer],
        *,
        heartbeat_s: float,
        deadline_s: float,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._peers = peers
        self._here = process_name()
        self._heartbeat_s = heartbeat_s
        self._deadline_s = deadline_s
        self._clock = clock
        self._newest_s = dict.fromkeys(peers, clock())
        self._gone: set[int] = set()
        self._behind: set[int] = set()  # peers whose connection has not taken all
        self._soon: deque[Callable[[], None]] = deque()
        self._calls: deque[tuple[float, Callable[[], None]]] = deque()  # with when they are due
        self._closing = threading.Event()
        self._wake, self._woken = socket.socketpair()
        self._thread: threading.Thread | None = None
        self._selector = selectors.DefaultSelector()

    def start(self, receiver: Receiver) -> None:
        """Start the thread, which notifies ``receiver`` of all that happens."""
        self._thread = threading.Thread(
            target=self._run, args=(receiver,), name="evenstep-channel", daemon=True
        )
        self._thread.start()

    def send(self, peer: int, message: bytes) -> None:
        """Send ``message``; to a peer that is gone, nothing: its loss was reported already."""
        self._send((peer,), text_of(message))

    def send_all(self, message: bytes, *, to: Iterable[int] | None = None) -> None:
        """Send ``message`` to every peer, or to some of them."""
        self._send(self._peers if to is None else to, text_of(message))

    def _send(self, numbers: Iterable[int], text: Text) -> None:
        gone, peers = self._gone, self._peers
        behind = [one for one in numbers if one not in gone and peers[one].send(text)]
        if behind:
            self._behind.update(behind)
            self._wake_up()  # the thread sends the rest

    def call_soon(self, call: Callable[[], None]) -> None:
        """Have the channel's thread make calls, in order, before those that may come later.

        For other threads: once in a step that is due.
        """
        self._soon.append(call)
        self._wake.send(b"x")

    def call_later(self, call: Callable[[], None], *, delay_s: float) -> None:
        """Have the channel's thread make calls, in order, each in ``delay_s`` or at the close."""
        self._calls.append((self._clock() + delay_s, call))
        self._wake_up()

    def _wake_up(self) -> None:
        if threading.current_thread() is not self._thread:
            self._wake.send(b"x")

    def close(self) -> None:
        """Stop the thread and close the connections. May be called again."""
        self._closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._wake.send(b"x")
            self._thread.join(_JOIN_S)
            if not self._thread.is_alive():
                self._make_calls(math.inf)
            self._thread = None
            for number in self._peers.keys() - self._gone:
                self._peers[number].send_rest()
        rest: tuple[Any, ...] = (self._wake, self._woken, self._selector)
        for one in (*self._peers.values(), *rest):
            one.close()

    def _run(self, receiver: Receiver) -> None:
        try:
            self._serve(receiver)
        except Exception as error:
            if self._closing.is_set():
                return  # closed under a thread that had not come to its end
            say("The exchange between the ranks broke down.", error=error)
            self._give_up(f"the thread that talks to it failed ({error!r})", receiver)

    def _give_up(self, problem: str, receiver: Receiver) -> None:
        """Lose all peers, and act on that until the close."""
        for peer in self._peers.values():
            peer.hang_up()  # first: the others are to take this rank for the one that was lost
        for number in self._peers:
            self._lose(number, problem, receiver)
        while not self._closing.wait(self._heartbeat_s):
            self._make_calls(self._clock())
            self._guard(receiver.tick)

    def _serve(self, receiver: Receiver) -> None:
        selector = self._selector
        for number, peer in self._peers.items():
            selector.register(peer.connection, selectors.EVENT_READ, number)
        selector.register(self._woken, selectors.EVENT_READ, None)
        beat_s = self._clock()
        self._newest_s = dict.fromkeys(self._newest_s, beat_s)
        while not self._closing.is_set():
            for key, _ in selector.select(timeout=self._wait_s(beat_s)):
                if key.data is None:
                    self._woken.recv(1 << 12)
                else:
                    self._read(key.data, receiver)
            now_s = self._clock()
            self._make_calls(now_s)
            if now_s >= beat_s:
                self._beat(now_s, receiver, late_s=now_s - beat_s)
                beat_s = now_s + self._heartbeat_s

    def _wait_s(self, beat_s: float) -> float:
        """Return how long there is nothing to do, having sent what could be."""
        if self._soon:
            return 0.0
        due_s = min(beat_s, self._calls[0][0]) if self._calls else beat_s
        most_s = _FLUSH_S if self._flush() else math.inf
        return min(max(0.0, due_s - self._clock()), most_s)

    def _flush(self) -> bool:
        """Send what connections take by now; return whether any of them leaves something."""
        for number in tuple(self._behind - self._gone):
            self._behind.discard(number)  # before: another thread may add it meanwhile
            if self._peers[number].flush():
                self._behind.add(number)
        return bool(self._behind - self._gone)

    def _beat(self, now_s: float, receiver: Receiver, *, late_s: float) -> None:
        for number, peer in self._peers.items():
            if number not in self._gone and peer.beat():
                self._behind.add(number)
        if late_s > self._heartbeat_s:  # this process was stopped, and the others are not late
            self._newest_s = dict.fromkeys(self._newest_s, now_s)
        self._check_silence(now_s, receiver)
        self._guard(receiver.tick)

    def _make_calls(self, now_s: float) -> None:
        while self._soon:
            self._guard(self._soon.popleft())
        while self._calls and self._calls[0][0] <= now_s:
            _, call = self._calls.popleft()
            self._guard(call)

    def _read(self, number: int, receiver: Receiver) -> None:
        """Take in what a peer sent, or that its connection is at an end."""
        peer = self._peers[number]
        if (messages := peer.receive()) is not None:
            self._newest_s[number] = self._clock()
        for message in messages or ():
            self._guard(receiver.received, number, message)
        if peer.end:
            self._selector.unregister(peer.connection)
            peer.hang_up()
            self._lose(number, peer.end, receiver)

    def _check_silence(self, now_s: float, receiver: Receiver) -> None:
        for number, peer in self._peers.items():
            silent_s = now_s - self._newest_s[number]
            if number in self._gone:
                continue
            if silent_s > self._deadline_s:
                self._lose(number, f"it has been silent for {silent_s:.1f} s: {_SILENT}", receiver)
            elif silent_s > 2 * self._heartbeat_s and has_ended(peer.process, self._here):
                # Its forked loader workers may keep the connection open for some seconds.
                self._lose(number, CLOSED, receiver)

    def _lose(self, number: int, problem: str, receiver: Receiver) -> None:
        if number not in self._gone:
            self._gone.add(number)
            self._guard(receiver.lost, number, problem)

    def _guard(self, call: Callable[..., None], *arguments: Any) -> None:
        """Keep the thread alive whatever the receiver does."""
        try:
            call(*arguments)
        except Exception as error:
            say("The exchange failed on a message.", error=error)
