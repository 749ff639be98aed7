"""How every rank gets its connection to rank 0, at the start and after a break."""

from __future__ import annotations

import secrets
import selectors
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from ._door import Door
from ._greeting import Newcomer, receive, send, tune
from ._process import process_name

LOOPBACK = "127.0.0.1"
_LOOK_S = 0.5  # between two looks at who has not greeted


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
    server = _listen(addresses, max(world_size, 128))
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
            send(connection, greeting)
            num_arrived = int(receive(connection)["received"])
        except Exception as error:  # whatever somebody else may answer on that port
            problems.append(f"{address}: {error}")
            if connection is not None:
                connection.close()
        else:
            return tune(connection), num_arrived
    raise ConnectionError(
        f"Rank {rank} cannot reach rank 0 on port {meeting.port}; tried "
        f"{'; '.join(problems)}. Name an address of rank 0 that all can reach with "
        f"`Runtime(address=...)`."
    )


def _listen(addresses: Sequence[str], backlog: int) -> socket.socket:
    """Return a socket that listens where rank 0 is to be reached, and nowhere else if that is here.

    By IPv6 as well where this host has it, as some have nothing else.
    """
    if set(addresses) == {LOOPBACK}:
        return socket.create_server((LOOPBACK, 0), backlog=backlog)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog
            )
        except OSError:
            pass  # compiled in, and switched off
    return socket.create_server(("", 0), backlog=backlog)


def _accept_all(server: socket.socket, world_size: int, meeting: Meeting, timeout_s: float) -> Star:
    """Let all ranks in, whoever else is at the door."""
    star = Star(0, meeting, {}, {}, server)
    deadline_s = monotonic() + timeout_s
    server.setblocking(False)
    with selectors.DefaultSelector() as selector:
        door = Door(meeting.token, selector)
        selector.register(server, selectors.EVENT_READ, None)
        try:
            while len(star.connections) < world_size - 1:
                left_s = deadline_s - monotonic()
                if left_s <= 0:
                    raise _missing(star, world_size, timeout_s)
                for key, _ in selector.select(min(left_s, _LOOK_S)):
                    if key.data is None:
                        door.accept(server, monotonic())
                    else:
                        _greet(door, key.data, star)
                door.clear(monotonic())
        except BaseException:
            for connected in star.connections.values():
                connected.close()
            raise
        finally:
            door.close()
    return star


def _greet(door: Door, newcomer: Newcomer, star: Star) -> None:
    """Let a newcomer in if it has said who it is, and turn a stranger away."""
    try:
        said = newcomer.read()
        if said is not None:
            door.let_in(newcomer)
            star.connections[said.rank] = newcomer.welcome(0)
            star.processes[said.rank] = said.process
    except Exception:  # strangers send anything
        door.turn_away(newcomer)


def _missing(star: Star, world_size: int, timeout_s: float) -> ConnectionError:
    missing = sorted(set(range(1, world_size)) - set(star.connections))
    return ConnectionError(
        f"Ranks {missing} did not reach rank 0 within {timeout_s:g} s. The balancer needs "
        f"one TCP connection from each rank to rank 0: open the ports between the "
        f"hosts, or name an address of rank 0 that all can reach with "
        f"`Runtime(address=...)`."
    )
