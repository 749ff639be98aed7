"""How every rank gets its connection to rank 0, at the start and after a break."""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from ._process import process_name

_LENGTH = struct.Struct("!I")
_LONGEST = 4096  # bytes of a greeting; who sends more is a stranger
_GREETING_S = 5.0


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where and how to reach rank 0; the same on all ranks.

    Attributes:
        addresses: host names or addresses, best first.
        port: where rank 0 listens.
        token: random text that keeps strangers out, and workers of an earlier run.
        process: the name of rank 0's process, where it has one.
    """

    addresses: tuple[str, ...]
    port: int
    token: str
    process: str | None


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a rank says first.

    Attributes:
        rank: who it is.
        num_received: messages it has received from rank 0 over earlier connections.
        process: the name of its process, where it has one.
    """

    rank: int
    num_received: int
    process: str | None


@dataclass(frozen=True, slots=True)
class Star:
    """The connections of one rank, and what it takes to make one again.

    Attributes:
        rank: this process.
        meeting: where rank 0 is reached.
        connections: open sockets, by peer.
        processes: names of the peers' processes, by peer.
        server: on rank 0, where it listens; None elsewhere.
    """

    rank: int
    meeting: Meeting
    connections: dict[int, socket.socket]
    processes: dict[int, str | None]
    server: socket.socket | None = None


def connect_star(
    rank: int,
    world_size: int,
    share: Callable[[Any], Any],
    *,
    addresses: Sequence[str],
    timeout_s: float = 60.0,
) -> Star:
    """Open the connections of a star around rank 0.

    Rank 0 listens on a free port, for as long as the run lasts, and tells the others, through
    ``share``, its addresses, the port and a random token.

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
        meeting = Meeting(**share(None))
        connection, _ = dial(meeting, rank, 0, timeout_s=timeout_s)
        return Star(rank, meeting, {0: connection}, {0: meeting.process})
    server = socket.create_server(("", 0), backlog=max(world_size, 16))
    try:
        meeting = Meeting(
            tuple(addresses), server.getsockname()[1], secrets.token_hex(16), process_name()
        )
        share({name: getattr(meeting, name) for name in Meeting.__slots__})
        return _accept_all(server, world_size, meeting, timeout_s)
    except BaseException:
        server.close()
        raise


def dial(
    meeting: Meeting, rank: int, num_received: int, *, timeout_s: float
) -> tuple[socket.socket, int]:
    """Connect to rank 0; return the connection and how many messages had arrived there.

    Raises:
        ConnectionError: rank 0 could not be reached.
    """
    problems = []
    deadline_s = monotonic() + timeout_s
    greeting = {
        "token": meeting.token,
        "rank": rank,
        "received": num_received,
        "process": process_name(),
    }
    for address in meeting.addresses:
        left_s = max(0.1, min(10.0, deadline_s - monotonic()))
        connection = None
        try:
            connection = socket.create_connection((address, meeting.port), timeout=left_s)
            connection.settimeout(max(0.1, deadline_s - monotonic()))
            _send(connection, greeting)
            num_arrived = int(_receive(connection)["received"])
        except Exception as error:  # whatever somebody else may answer on that port
            problems.append(f"{address}: {error}")
            if connection is not None:
                connection.close()
        else:
            return _tune(connection), num_arrived
    raise ConnectionError(
        f"Rank {rank} cannot reach rank 0 on port {meeting.port}; tried "
        f"{'; '.join(problems)}. Name an address of rank 0 that all can reach with "
        f"`Runtime(address=...)`."
    )


class Newcomer:
    """A connection that has not said yet whose it is.

    Args:
        connection: just accepted.
        token: what it has to know.
    """

    def __init__(self, connection: socket.socket, token: str) -> None:
        self.connection = connection
        self._token = token
        self._buffer = bytearray()
        connection.setblocking(False)

    def read(self) -> Greeting | None:
        """Read what is there; return the greeting, or None if it is not complete.

        Raises:
            ValueError: a stranger. Close the connection.
        """
        try:
            data = self.connection.recv(_LONGEST)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ValueError(str(error)) from error
        self._buffer += data
        if not data or len(self._buffer) > _LONGEST:
            raise ValueError("no greeting")
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > _LONGEST:
            raise ValueError("no greeting")
        if len(self._buffer) < _LENGTH.size + length:
            return None
        return _greeting(bytes(self._buffer[_LENGTH.size :]), self._token)

    def welcome(self, num_received: int) -> socket.socket:
        """Answer the greeting and return the connection, ready to use.

        Args:
            num_received: messages received from that rank over earlier connections.
        """
        self.connection.settimeout(None)
        _send(self.connection, {"received": num_received})
        return _tune(self.connection)


def _greeting(text: bytes, token: str) -> Greeting:
    try:
        said = json.loads(text)
        if not hmac.compare_digest(said["token"].encode(), token.encode()):
            raise ValueError("the token is another one")
        return Greeting(int(said["rank"]), int(said["received"]), said["process"])
    except Exception as error:  # strangers send anything: nested too deep, no object at all
        raise ValueError("no greeting") from error


def _accept_all(server: socket.socket, world_size: int, meeting: Meeting, timeout_s: float) -> Star:
    star = Star(0, meeting, {}, {}, server)
    deadline_s = monotonic() + timeout_s
    while len(star.connections) < world_size - 1:
        server.settimeout(max(0.01, deadline_s - monotonic()))
        try:
            connection, _ = server.accept()
        except TimeoutError as error:
            missing = sorted(set(range(1, world_size)) - set(star.connections))
            for connected in star.connections.values():
                connected.close()
            raise ConnectionError(
                f"Ranks {missing} did not reach rank 0 within {timeout_s:g} s. The balancer needs "
                f"one TCP connection from each rank to rank 0: open the ports between the "
                f"hosts, or name an address of rank 0 that all can reach with "
                f"`Runtime(address=...)`."
            ) from error
        connection.settimeout(max(0.01, min(_GREETING_S, deadline_s - monotonic())))
        try:
            said = _greeting(json.dumps(_receive(connection)).encode(), meeting.token)
            _send(connection, {"received": 0})
        except Exception:
            connection.close()  # a stranger
            continue
        star.connections[said.rank] = _tune(connection)
        star.processes[said.rank] = said.process
    return star


def _send(connection: socket.socket, value: dict[str, Any]) -> None:
    text = json.dumps(value).encode()
    connection.sendall(_LENGTH.pack(len(text)) + text)


def _receive(connection: socket.socket) -> Any:
    (length,) = _LENGTH.unpack(_read_exactly(connection, _LENGTH.size))
    if length > _LONGEST:
        raise ValueError("no greeting")
    return json.loads(_read_exactly(connection, length))


def _read_exactly(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = connection.recv(length - len(data))
        if not more:
            raise ConnectionError("the connection closed")
        data += more
    return data


def _tune(connection: socket.socket) -> socket.socket:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
