"""How fast bytes come from another rank, by one TCP connection, and whose link is measured when."""

from __future__ import annotations

import hmac
import socket
import statistics
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self, final

from ._checkup_facts import LinkSpeed

Pair = tuple[int, int]
"""Receiver and sender."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Turns in which links are measured.

    Attributes:
        turns: pairs that measure at the same time; no host is in two of them.
        skipped: pairs of hosts that there is no time for.
    """

    turns: tuple[tuple[Pair, ...], ...]
    skipped: int = 0


def schedule(hosts: Sequence[Sequence[int]], *, turn_s: float, budget_s: float) -> Schedule:
    """Return the turns for the first rank of every host, and for two ranks of each host.

    Ranks of one host share its link, so one of them measures it. Pairs go one by one as long as
    that fits into ``budget_s``: no measurement disturbs another. Else all hosts measure at once in
    pairs, as in a tournament in which each meets each (the circle method); and where even that
    takes too long, in as many of its rounds as there is time for. Each host has met some others
    then.

    Args:
        hosts: ranks of each host, none empty.
        turn_s: what one turn takes.
        budget_s: what all may take; there is one round at least.
    """
    most = max(2, int(budget_s / turn_s))
    inside = [(ranks[0], ranks[1]) for ranks in hosts if len(ranks) > 1]
    first = [ranks[0] for ranks in hosts]
    rounds = _tournament(first)
    pairs = sum(map(len, rounds))
    if 2 * (pairs + len(inside)) <= most:
        one_by_one = [*((pair,) for pair in inside), *((p,) for each in rounds for p in each)]
        return Schedule(_both_ways(one_by_one))
    within = [tuple(inside)] if inside else []
    kept = rounds[: max(1, most // 2 - len(within))]
    return Schedule(_both_ways([*within, *kept]), pairs - sum(map(len, kept)))


def _tournament(players: Sequence[int]) -> list[tuple[Pair, ...]]:
    """Return rounds in which each meets each once; no rank is in two pairs of a round."""
    ring: list[int | None] = [*players, *([None] if len(players) % 2 else [])]
    half, rounds = len(ring) // 2, []
    for _ in range(len(ring) - 1):
        drawn = zip(ring[:half], reversed(ring[half:]), strict=True)
        pairs = [(a, b) for a, b in drawn if a is not None and b is not None]
        if pairs:
            rounds.append(tuple((min(pair), max(pair)) for pair in pairs))
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


def _both_ways(rounds: Sequence[tuple[Pair, ...]]) -> tuple[tuple[Pair, ...], ...]:
    return tuple(turn for pairs in rounds for turn in (pairs, tuple((b, a) for a, b in pairs)))


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
