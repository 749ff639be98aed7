"""The TCP connections of this process: where they lead, and what the kernel counts of them."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from time import monotonic
from typing import NamedTuple, final

from .._diagnosis import LinkClues

_FAMILIES = socket.AF_INET, socket.AF_INET6
_TYPE = socket.SOL_SOCKET, socket.SO_TYPE
_DESCRIPTORS = "/proc/self/fd"


@dataclass(frozen=True, slots=True)
class Connection:
    """An established TCP connection of this process.

    Attributes:
        descriptor: its number in this process.
        here, there: the addresses of its two ends.
        ports: of its two ends.
    """

    descriptor: int
    here: str
    there: str
    ports: tuple[int, int]


def connections() -> Iterator[Connection]:
    """Yield the established connections of this process; none where there is no /proc.

    Each socket is asked for its ends: the kernel takes milliseconds to list those of all processes.
    """
    for descriptor, _ in _sockets():
        with suppress(OSError):
            if (found := _connection(descriptor)) is not None:
                yield found


def _sockets() -> Iterator[tuple[int, str]]:
    """Yield the descriptors of sockets, with the name that each socket has as long as it lives."""
    with suppress(OSError):
        for name in os.listdir(_DESCRIPTORS):
            with suppress(OSError):
                if (link := os.readlink(f"{_DESCRIPTORS}/{name}")).startswith("socket:"):
                    yield int(name), link


@contextmanager
def _opened(descriptor: int) -> Iterator[socket.socket]:
    """Open a socket by a descriptor of its own, which leaves the first one as it is.

    With this type, the constructor leaves the socket alone; with another one, a default timeout
    of the user's would make it non-blocking for gloo too.
    """
    kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK
    with socket.socket(type=kind, fileno=os.dup(descriptor)) as again:
        yield again


def _connection(descriptor: int) -> Connection | None:
    """Return the connection of a socket; None if it is not TCP's.

    Raises:
        OSError: it has no other end.
    """
    with _opened(descriptor) as again:
        if again.family not in _FAMILIES or again.getsockopt(*_TYPE) != socket.SOCK_STREAM:
            return None
        here, port, *_ = again.getsockname()
        there, other, *_ = again.getpeername()
    return Connection(descriptor, _plain(here), _plain(there), (port, other))


def _plain(address: str) -> str:
    """Return an address without its interface, and one of IPv4 as that."""
    found = ip_address(address.partition("%")[0])
    if isinstance(found, IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return str(found)


# Of Linux's `struct tcp_info`, which only grows at its end: `tcpi_total_retrans`,
# `tcpi_bytes_acked` and `tcpi_bytes_received`, `tcpi_data_segs_out`, `tcpi_busy_time` and
# `tcpi_rwnd_limited`. Linux 4.10 is the first to have them all.
_RESENT, _BYTES, _SEGMENTS, _TIMES = 100, 120, 156, 168
_INFO_SIZE = 184


class TcpCounts(NamedTuple):
    """What the kernel counts of a connection since it was made; all only grow.

    Attributes:
        acked_bytes, received_bytes: that reached the other end, and that came from there.
        busy_us: microseconds with something to send or on its way.
        reader_us: of those, for which the other end's window was closed.
        num_segments, num_resent: with data, all and those sent again.
    """

    acked_bytes: int = 0
    received_bytes: int = 0
    busy_us: int = 0
    reader_us: int = 0
    num_segments: int = 0
    num_resent: int = 0

    @classmethod
    def of(cls, info: bytes) -> TcpCounts | None:
        """Return what ``TCP_INFO`` has; None where an older kernel has less of it."""
        if len(info) < _INFO_SIZE:
            return None
        (resent,) = struct.unpack_from("=I", info, _RESENT)
        (segments,) = struct.unpack_from("=I", info, _SEGMENTS)
        acked, received = struct.unpack_from("=QQ", info, _BYTES)
        busy_us, reader_us = struct.unpack_from("=QQ", info, _TIMES)
        return cls(acked, received, busy_us, reader_us, segments, resent)


def _counts(descriptor: int) -> TcpCounts | None:
    """Return what is counted of a connection; None where the system does not say."""
    option = getattr(socket, "TCP_INFO", None)
    if option is None:
        return None
    with _opened(descriptor) as again:
        return TcpCounts.of(again.getsockopt(socket.IPPROTO_TCP, option, _INFO_SIZE))


_LEAST_BYTES = 1 << 16  # both ways: a connection that carried less is left out
_MOST_LINKS = 64  # of a look, those that carried most
_EVERY_S = 4.0
_RESTS = 500  # times as long as a look took: it holds Python's lock, in turns with the training


_Seen = tuple[str, str, TcpCounts]
"""Both ends of a connection, and what was counted when it was last returned."""


@final
class LinkReader:
    """Reads what connections to other hosts carried, every few seconds.

    A look takes about 10 us for each socket of the process, and leaves all of them as they are.
    Which connections are a process group's is not known here: those that lead from one rank to
    another are. One that carried little is left out, and counts on.

    Args:
        now: a monotonic clock in seconds.
        is_link: whether a connection counts: one inside of a host is no link.
    """

    def __init__(
        self,
        *,
        now: Callable[[], float] = monotonic,
        is_link: Callable[[Connection], bool] = lambda one: one.here != one.there,
    ) -> None:
        self._now, self._is_link = now, is_link
        self._due_s = 0.0
        self._seen: dict[str, _Seen | None] = {}  # by the socket's name; None is no link

    def read(self) -> tuple[LinkClues, ...]:
        """Return what was carried since it was last returned, if it is time to look again."""
        if (began_s := self._now()) < self._due_s:
            return ()
        found = self._look()
        ended_s = self._now()
        self._due_s = ended_s + max(_EVERY_S, _RESTS * (ended_s - began_s))
        found.sort(key=lambda one: -one[0])
        return tuple(link for _, link in found[:_MOST_LINKS])

    def _look(self) -> list[tuple[int, LinkClues]]:
        """Return what each connection has carried both ways, and sent."""
        before, self._seen = self._seen, {}
        found = []
        for descriptor, name in _sockets():
            with suppress(OSError):
                old = before[name] if name in before else self._met(descriptor)
                self._seen[name] = old
                if old is None or (counts := _counts(descriptor)) is None:
                    continue
                here, there, known = old
                new = TcpCounts(*(a - b for a, b in zip(counts, known, strict=True)))
                if (carried := new.acked_bytes + new.received_bytes) >= _LEAST_BYTES:
                    self._seen[name] = here, there, counts
                    sent, _, *others = new
                    found.append((carried, LinkClues(here, there, sent, *others)))
        return found

    def _met(self, descriptor: int) -> _Seen | None:
        """Return a connection that was not seen before; None where it is no link.

        Raises:
            OSError: it is not connected, or not any more.
        """
        one = _connection(descriptor)
        if one is None or not self._is_link(one):
            return None
        here, there = (
            f"{at}:{port}" for at, port in zip((one.here, one.there), one.ports, strict=True)
        )
        return here, there, TcpCounts()
