"""A star of TCP connections around rank 0: small messages, heartbeats, and who fell silent.

Why not the process group: gloo names only a port when a peer dies and nothing at all when one is
stopped, its receives cannot be given up without breaking the group, and a group's life ends with
`destroy_process_group`. A socket per peer says at once which peer closed it.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any, Protocol

_HEADER = struct.Struct("!I")  # length of the JSON text that follows; 0 is a heartbeat
Message = dict[str, Any]


class Receiver(Protocol):
    """What a channel tells its owner, from the channel's thread."""

    def received(self, peer: int, message: Message) -> None:
        """Take a message from ``peer``."""

    def lost(self, peer: int, problem: str) -> None:
        """Take notice that ``peer`` closed its connection or fell silent; told once for each."""

    def tick(self) -> None:
        """Do what is due now and then; called about every heartbeat."""


class StarChannel:
    """Sends and receives messages, rank 0 with everybody and everybody with rank 0.

    One daemon thread reads the connections and sends a heartbeat on each every ``heartbeat_s``.
    A peer that has sent nothing for ``deadline_s`` counts as lost: so a stopped process is
    noticed as well as a dead one. A pause of this process itself is no silence of the others.

    Args:
        connections: an open socket for each peer's rank. They belong to the channel from now on.
        heartbeat_s: seconds between two heartbeats, positive.
        deadline_s: seconds of silence after which a peer counts as lost, more than
            ``heartbeat_s``.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        connections: dict[int, socket.socket],
        *,
        heartbeat_s: float,
        deadline_s: float,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._connections = dict(connections)
        self._heartbeat_s = heartbeat_s
        self._deadline_s = deadline_s
        self._clock = clock
        self._buffers = {peer: bytearray() for peer in connections}
        self._locks = {peer: threading.Lock() for peer in connections}
        self._heard = dict.fromkeys(connections, clock())
        self._gone: set[int] = set()
        self._calls: deque[tuple[float, Callable[[], None]]] = deque()  # with when they are due
        self._closing = threading.Event()
        self._wake, self._woken = socket.socketpair()
        self._thread: threading.Thread | None = None

    def start(self, receiver: Receiver) -> None:
        """Start the thread, which tells ``receiver`` whatever happens."""
        self._thread = threading.Thread(
            target=self._run, args=(receiver,), name="evenstep-channel", daemon=True
        )
        self._thread.start()

    def send(self, peer: int, message: Message) -> None:
        """Send ``message``; to a peer that is gone, nothing: its loss was told already."""
        text = json.dumps(message).encode()
        self._send(peer, _HEADER.pack(len(text)) + text)

    def send_all(self, message: Message) -> None:
        """Send ``message`` to every peer."""
        text = json.dumps(message).encode()
        frame = _HEADER.pack(len(text)) + text
        for peer in self._connections:
            self._send(peer, frame)

    def call_later(self, call: Callable[[], None], *, delay_s: float) -> None:
        """Have the channel's thread make ``call`` in ``delay_s`` seconds, or at the close.

        In the order in which they were asked for.
        """
        self._calls.append((self._clock() + delay_s, call))
        if threading.current_thread() is not self._thread:
            self._wake.send(b"x")

    def close(self) -> None:
        """Stop the thread and close the connections. May be called again."""
        self._closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._wake.send(b"x")
            self._thread.join()
            self._thread = None
            self._make_calls(math.inf)
        for connection in (*self._connections.values(), self._wake, self._woken):
            connection.close()

    def _send(self, peer: int, frame: bytes) -> None:
        if peer in self._gone:
            return
        try:
            with self._locks[peer]:
                self._connections[peer].sendall(frame)
        except OSError:
            pass  # the reading side meets the same break, and tells it with the peer's name

    def _run(self, receiver: Receiver) -> None:
        with selectors.DefaultSelector() as selector:
            for peer, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, peer)
            selector.register(self._woken, selectors.EVENT_READ, None)
            beat_s = self._clock()
            self._heard = dict.fromkeys(self._heard, beat_s)
            while not self._closing.is_set():
                due_s = min(beat_s, self._calls[0][0]) if self._calls else beat_s
                for key, _ in selector.select(timeout=max(0.0, due_s - self._clock())):
                    if key.data is None:
                        self._woken.recv(1 << 12)
                    elif not self._read(key.data, receiver):
                        selector.unregister(key.fileobj)
                now_s = self._clock()
                self._make_calls(now_s)
                if now_s >= beat_s:
                    self._beat(now_s, receiver, late_s=now_s - beat_s)
                    beat_s = now_s + self._heartbeat_s

    def _beat(self, now_s: float, receiver: Receiver, *, late_s: float) -> None:
        for peer in self._connections:
            self._send(peer, _HEADER.pack(0))
        if late_s > self._heartbeat_s:  # this process was stopped: nobody else is late
            self._heard = dict.fromkeys(self._heard, now_s)
        self._check_silence(now_s, receiver)
        self._guard(receiver.tick)

    def _make_calls(self, now_s: float) -> None:
        while self._calls and self._calls[0][0] <= now_s:
            _, call = self._calls.popleft()
            self._guard(call)

    def _read(self, peer: int, receiver: Receiver) -> bool:
        """Take in what ``peer`` sent; return whether more can come."""
        buffer = self._buffers[peer]
        try:
            data = self._connections[peer].recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._lose(peer, "its connection closed: it ended, was killed or cut off", receiver)
            return False
        self._heard[peer] = self._clock()
        buffer += data
        while len(buffer) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(buffer)
            if len(buffer) < _HEADER.size + length:
                break
            text = bytes(buffer[_HEADER.size : _HEADER.size + length])
            del buffer[: _HEADER.size + length]
            if text:
                self._guard(partial(receiver.received, peer, json.loads(text)))
        return True

    def _check_silence(self, now_s: float, receiver: Receiver) -> None:
        for peer, heard_s in self._heard.items():
            if peer not in self._gone and now_s - heard_s > self._deadline_s:
                problem = (
                    f"it has been silent for {now_s - heard_s:.1f} s: stopped, hung or cut off"
                )
                self._lose(peer, problem, receiver)

    def _lose(self, peer: int, problem: str, receiver: Receiver) -> None:
        if peer not in self._gone:
            self._gone.add(peer)
            self._guard(partial(receiver.lost, peer, problem))

    def _guard(self, call: Callable[[], None]) -> None:
        """Keep the thread alive whatever the receiver does."""
        try:
            call()
        except Exception:
            logging.getLogger("evenstep").exception("The exchange failed on a message.")


def connect_star(
    rank: int,
    world_size: int,
    share: Callable[[Any], Any],
    *,
    addresses: Sequence[str],
    timeout_s: float = 60.0,
) -> dict[int, socket.socket]:
    """Open the connections of a star around rank 0 and return them by peer.

    Rank 0 listens on a free port and tells the others, through ``share``, its addresses, the
    port and a random token that keeps strangers out.

    Args:
        rank: this process.
        world_size: number of processes.
        share: broadcasts an object from rank 0: called with it there and with None elsewhere,
            it returns it everywhere.
        addresses: host names or addresses under which others may reach rank 0, best first; used
            on rank 0 only.
        timeout_s: how long to try.

    Raises:
        ConnectionError: a connection could not be made in time; the message says what was tried.
    """
    if rank != 0:
        meeting = share(None)
        return {0: _call(rank, meeting, timeout_s)}
    with socket.create_server(("", 0), backlog=world_size) as server:
        token = secrets.token_hex(16)
        share({"addresses": list(addresses), "port": server.getsockname()[1], "token": token})
        return _accept(server, world_size, token.encode(), timeout_s)


def _accept(
    server: socket.socket, world_size: int, token: bytes, timeout_s: float
) -> dict[int, socket.socket]:
    connections: dict[int, socket.socket] = {}
    deadline_s = monotonic() + timeout_s
    while len(connections) < world_size - 1:
        server.settimeout(max(0.01, deadline_s - monotonic()))
        try:
            connection, _ = server.accept()
            connection.settimeout(max(0.01, deadline_s - monotonic()))
            greeting = _read_exactly(connection, len(token) + 4)
        except TimeoutError as error:
            missing = sorted(set(range(1, world_size)) - set(connections))
            raise ConnectionError(
                f"Ranks {missing} did not reach rank 0 within {timeout_s:g} s. The balancer needs "
                f"one TCP connection from each rank to rank 0: open the ports between the "
                f"hosts, or name an address of rank 0 that all can reach with "
                f"`Runtime(address=...)`."
            ) from error
        if greeting[:-4] != token:
            connection.close()
            continue
        connections[int.from_bytes(greeting[-4:])] = _tuned(connection)
    return connections


def _call(rank: int, meeting: dict[str, Any], timeout_s: float) -> socket.socket:
    problems = []
    deadline_s = monotonic() + timeout_s
    for address in meeting["addresses"]:
        try:
            left_s = max(1.0, min(10.0, deadline_s - monotonic()))
            connection = socket.create_connection((address, meeting["port"]), timeout=left_s)
        except OSError as error:
            problems.append(f"{address}: {error}")
            continue
        connection.sendall(meeting["token"].encode() + rank.to_bytes(4))
        return _tuned(connection)
    raise ConnectionError(
        f"Rank {rank} cannot reach rank 0 on port {meeting['port']}; tried "
        f"{'; '.join(problems)}. Name an address of rank 0 that all can reach with "
        f"`Runtime(address=...)`."
    )


def _read_exactly(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length and (more := connection.recv(length - len(data))):
        data += more
    return data


def _tuned(connection: socket.socket) -> socket.socket:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
