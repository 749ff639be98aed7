"""How fast bytes come from another rank: one TCP connection, for a bounded time."""

from __future__ import annotations

import hmac
import socket
import statistics
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Self, final

from ._checkup_facts import LinkSpeed

CONNECT_S = 2.0
SETTLE_S = 0.15
"""Bytes of the start are not counted: windows grow, and a shaped link lets a burst through."""
FLOW_S = 0.6
PINGS, PINGS_S = 40, 0.3
TURN_S = SETTLE_S + FLOW_S + PINGS_S
"""What a measurement takes at most, once connected."""
_BLOCK = 1 << 20
_SMALL = 64
_MOST_AT_ONCE = 16


@final
class LinkServer:
    """Answers the others' measurements, from ``with`` to its end.

    A connection without the token is not answered.

    Args:
        token: what all ranks know.
    """

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        self._room = threading.Semaphore(_MOST_AT_ONCE)

    def __enter__(self) -> Self:
        if socket.has_dualstack_ipv6():
            self._listener = socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=True
            )
        else:
            self._listener = socket.create_server(("", 0))
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # closing alone leaves `accept` waiting
        self._listener.close()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            if self._room.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, suppress(OSError):
                connection.settimeout(CONNECT_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if hmac.compare_digest(_exactly(connection, len(self._token)), self._token):
                    _answer(connection)
        finally:
            self._room.release()


def measure_link(receiver: int, sender: int, address: tuple[str, int], token: str) -> LinkSpeed:
    """Return what comes from ``sender``, and how long a small message takes there and back.

    Args:
        receiver: this rank.
        sender: the other one.
        address: where its ``LinkServer`` listens.
        token: what that was given.
    """
    try:
        with socket.create_connection(address, CONNECT_S) as connection:
            connection.settimeout(CONNECT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(token.encode())
            round_trip_s = _round_trip_s(connection)
            connection.sendall(b"F" * _SMALL)
            return LinkSpeed(receiver, sender, _rate(connection), round_trip_s)
    except OSError as error:
        reason = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        return LinkSpeed(receiver, sender, 0.0, 0.0, reason)


def _answer(connection: socket.socket) -> None:
    """Send small messages back; at the first that asks for it, send all there is."""
    while True:
        asked = _exactly(connection, _SMALL)
        if asked[:1] == b"F":
            break
        connection.sendall(asked)
    block, until_s = bytes(_BLOCK), time.monotonic() + SETTLE_S + FLOW_S + CONNECT_S
    while time.monotonic() < until_s:
        connection.sendall(block)  # ends with an error when the receiver has enough


def _round_trip_s(connection: socket.socket) -> float:
    took_s: list[float] = []
    until_s = time.perf_counter() + PINGS_S
    while len(took_s) < PINGS and (began_s := time.perf_counter()) < until_s:
        connection.sendall(b"P" * _SMALL)
        _exactly(connection, _SMALL)
        took_s.append(time.perf_counter() - began_s)
    return statistics.median(took_s)


def _rate(connection: socket.socket) -> float:
    """Return bytes per second, after the start."""
    buffer = bytearray(_BLOCK)
    began_s = from_s = now_s = time.perf_counter()
    counted = 0
    while now_s - began_s < SETTLE_S + FLOW_S:
        number = connection.recv_into(buffer)
        now_s = time.perf_counter()
        if number == 0:
            raise ConnectionError("the connection was closed")
        if now_s - began_s < SETTLE_S:
            from_s = now_s
        else:
            counted += number
    return counted / (now_s - from_s)


def _exactly(connection: socket.socket, number: int) -> bytes:
    """Return so many bytes.

    Raises:
        ConnectionError: it was closed before.
    """
    found = b""
    while len(found) < number:
        part = connection.recv(number - len(found))
        if not part:
            raise ConnectionError("the connection was closed")
        found += part
    return found
