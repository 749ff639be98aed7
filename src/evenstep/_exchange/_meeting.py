"""How every rank gets its connection to rank 0, once, at the start."""

from __future__ import annotations

import errno
import secrets
import selectors
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import monotonic, sleep
from typing import Any

from ._door import Door
from ._greeting import Greeting, Newcomer, greet, tune
from ._listening import interface_address, listen
from ._listening import loopback as loopback
from ._peer import Peer, hang_up
from ._process import process_name
from ._wire import VERSION, ProtocolError, check_versions
from ._world_check import listed

_LOOK_S = 0.5  # between two looks at which newcomers have not greeted
_TRY_S = 10.0  # for one address
_RETRY_S = 0.1  # between two tries where rank 0 turned the connection away
_BACKLOG = 1024  # in a flood, a call that finds no place there is made again after a second
_BUSY_S = 10.0  # for which a run that has just ended may still hold a port
_ANY = (0,)
_TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)


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


def connect_star(
    rank: int,
    world_size: int,
    share: Callable[[Any], Any],
    *,
    collect: Callable[[Any], list[Any]] | None = None,
    addresses: Sequence[str],
    ports: Sequence[int] = _ANY,
    timeout_s: float = 60.0,
) -> dict[int, Peer]:
    """Return the connections of a star around rank 0, by peer.

    Rank 0 tells the others, through ``share``, its addresses, the port and a random token. It
    listens until all have connected, and then no more: no stranger reaches a run.

    Args:
        rank: this process.
        world_size: number of processes.
        share: broadcasts an object from rank 0: called with it there and with None elsewhere,
            it returns it everywhere.
        collect: returns on every rank what each was called with; None has each rank find rank 0
            for itself.
        addresses: host names, addresses or network interfaces of rank 0 under which others may
            reach it, best first; used on rank 0 only.
        ports: for rank 0 to listen at the first free one of; 0 is any.
        timeout_s: how long to try.

    Raises:
        ConnectionError: a connection could not be made in time, or rank 0 cannot listen; the
            message says what was tried. On all ranks, where one of them cannot find rank 0.
        ProtocolError: ranks run unlike versions of evenstep.
    """
    if rank != 0:
        meeting = _meeting(share(None))
        if collect is not None:
            meeting, problem = _found(meeting, rank, timeout_s=timeout_s)
            _agree(collect, problem)
        return {0: dial(meeting, rank, timeout_s=timeout_s)}
    addresses = [interface_address(address) or address for address in addresses]
    busy_s, backlog = min(_BUSY_S, timeout_s), max(2 * world_size, _BACKLOG)
    try:
        server = listen(addresses, ports, backlog=backlog, timeout_s=busy_s)
    except ConnectionError as error:
        share({"problem": str(error)})
        raise
    try:
        meeting = Meeting(
            tuple(addresses), server.getsockname()[1], secrets.token_hex(16), process_name()
        )
        share({name: getattr(meeting, name) for name in Meeting.__slots__})
        if collect is not None:
            _agree(collect, None)
        return _accept_all(server, world_size, meeting, timeout_s)
    finally:
        hang_up(server)


def dial(meeting: Meeting, rank: int, *, timeout_s: float) -> Peer:
    """Connect to rank 0, and try again while it turns connections away.

    Args:
        meeting: where rank 0 is reached.
        rank: this process.
        timeout_s: how long to try.

    Raises:
        ConnectionError: rank 0 could not be reached.
        ProtocolError: rank 0 runs another version of evenstep.
    """
    deadline_s = monotonic() + timeout_s
    greeting = Greeting(rank, process_name())
    while True:
        problems, was_turned_away = [], False
        for address in meeting.addresses:
            try:
                return _call(meeting, address, greeting, deadline_s)
            except ProtocolError:
                raise
            except Exception as error:  # any other program may answer at that port
                problems.append(f"{address}: {error}")
                was_turned_away |= isinstance(error, _TurnedAwayError)
        if not was_turned_away or monotonic() + _RETRY_S > deadline_s:
            break
        sleep(_RETRY_S)
    raise ConnectionError(_unreachable(meeting, rank, problems))


def _found(meeting: Meeting, rank: int, *, timeout_s: float) -> tuple[Meeting, str | None]:
    """Return the meeting with an address first at which rank 0's host listens, or why none does."""
    problems = []
    for address in meeting.addresses:
        try:
            socket.create_connection((address, meeting.port), min(_TRY_S, timeout_s)).close()
        except Exception as error:  # names that are none raise in several ways
            problems.append(f"{address}: {error}")
        else:
            return replace(
                meeting, addresses=tuple(dict.fromkeys((address, *meeting.addresses)))
            ), None
    return meeting, _unreachable(meeting, rank, problems)


def _agree(collect: Callable[[Any], list[Any]], problem: str | None) -> None:
    """Raise on all ranks if one of them has a problem: rank 0 would wait for it."""
    for told in collect(problem):
        if told is not None:
            raise ConnectionError(told)


def _unreachable(meeting: Meeting, rank: int, problems: Sequence[str]) -> str:
    return (
        f"Rank {rank} cannot reach rank 0 on port {meeting.port}; tried {'; '.join(problems)}. "
        f"Name an address of rank 0 that all can reach with `Runtime(address=...)`."
    )


class _TurnedAwayError(ConnectionError):
    """The other end closed the connection before it answered."""


def _call(meeting: Meeting, address: str, greeting: Greeting, deadline_s: float) -> Peer:
    left_s = max(0.1, min(_TRY_S, deadline_s - monotonic()))
    connection = socket.create_connection((address, meeting.port), timeout=left_s)
    try:
        connection.settimeout(max(0.1, deadline_s - monotonic()))
        try:
            wire, version = greet(connection, meeting.token, greeting)
        except ConnectionError as error:
            raise _TurnedAwayError(str(error)) from error
        check_versions({0: version, greeting.rank: greeting.version})
    except BaseException:
        connection.close()
        raise
    return Peer(tune(connection), wire, process=meeting.process)


def _meeting(shared: dict[str, Any]) -> Meeting:
    """Return what rank 0 has shared."""
    if "problem" in shared:
        raise ConnectionError(shared["problem"])
    return Meeting(**{name: shared[name] for name in Meeting.__slots__})


def _accept_all(
    server: socket.socket, world_size: int, meeting: Meeting, timeout_s: float
) -> dict[int, Peer]:
    """Let all ranks in, whatever else connects."""
    peers: dict[int, Peer] = {}
    deadline_s = monotonic() + timeout_s
    server.setblocking(False)
    with selectors.DefaultSelector() as selector:
        door = Door(meeting.token, selector, num_ranks=world_size)
        selector.register(server, selectors.EVENT_READ, None)
        try:
            while len(peers) < world_size - 1:
                left_s = deadline_s - monotonic()
                if left_s <= 0:
                    raise _missing(peers, world_size, meeting, timeout_s)
                if door.problem is not None and door.problem.errno in _TOO_MANY_FILES:
                    raise ConnectionError(
                        f"Rank 0 needs {world_size - 1} connections and cannot open that many "
                        f"({door.problem.strerror}). Raise `ulimit -n` on its host."
                    )
                for key, _ in selector.select(min(left_s, _LOOK_S)):
                    if key.data is None:
                        door.accept(server, monotonic())
                    else:
                        _let_in(door, key.data, peers)
                door.clear(monotonic())
        except BaseException:
            for connected in peers.values():
                connected.close()
            raise
        finally:
            door.close()
    return peers


def _let_in(door: Door, newcomer: Newcomer, peers: dict[int, Peer]) -> None:
    """Let a newcomer in if it has said which rank it is.

    Raises:
        ProtocolError: a rank runs another version of evenstep; it hears of this one.
    """
    said = door.read(newcomer)
    if said is None:
        return
    if (connected := door.let_in(newcomer)) is None:
        return
    if (earlier := peers.get(said.rank)) is not None:  # one that the rank gave up
        earlier.close()
    peers[said.rank] = Peer(*connected, process=said.process)
    check_versions({0: VERSION, said.rank: said.version})


def _missing(
    peers: dict[int, Peer], world_size: int, meeting: Meeting, timeout_s: float
) -> ConnectionError:
    missing = listed(sorted(set(range(1, world_size)) - set(peers)))
    addresses = " or ".join(meeting.addresses)
    return ConnectionError(
        f"{missing.capitalize()} did not reach rank 0 within {timeout_s:g} s. The "
        f"balancer needs one TCP connection from each rank to port {meeting.port} of "
        f"{addresses}: open it between the hosts (`Runtime(ports=...)` sets which), or name an "
        f"address of rank 0 that all can reach with `Runtime(address=...)`."
    )
