"""How every rank gets its connection to rank 0, once, at the start: no wider than ranks need it."""

from __future__ import annotations

import errno
import hmac
import ipaddress
import json
import logging
import secrets
import selectors
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic, sleep
from typing import Any, NamedTuple, final

from ._channel import (
    VERSION,
    Peer,
    ProtocolError,
    Wire,
    check_versions,
    hang_up,
    num_missing,
    text_of,
)
from ._threads import process_name
from ._world_check import listed

_NONCE = 16  # bytes of each random text
_LONGEST = 4096  # bytes of a greeting

_STRANGERS = 64  # beside as many newcomers as there are ranks
_GREETING_S = 5.0


class Greeting(NamedTuple):
    """What a rank says first.

    Attributes:
        rank: that of the caller.
        process: the name of its process, where it has one.
        version: of evenstep and of the protocol, as ``VERSION`` has them.
    """

    rank: int
    process: str | None
    version: str = VERSION


@final
class PendingPeer:
    """A connection to rank 0 whose other end is not known yet.

    Args:
        connection: just accepted.
        token: what the other end has to know.

    Raises:
        OSError: the connection is gone again.
    """

    def __init__(self, connection: socket.socket, token: str) -> None:
        self.connection = connection
        self._token = token
        self._challenge = secrets.token_bytes(_NONCE)
        self._buffer = bytearray()
        self._wire: Wire | None = None
        connection.setblocking(False)
        connection.send(self._challenge)

    def has_answered(self) -> bool:
        """Return whether there is something to read."""
        try:
            return bool(self.connection.recv(1, socket.MSG_PEEK))
        except OSError:  # nothing yet, or it is gone
            return False

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
        if not data:
            raise ValueError("it said no more")
        self._buffer += data
        if self._wire is None:
            if len(self._buffer) < _NONCE:
                return None
            nonce = bytes(self._buffer[:_NONCE])
            self._wire = Wire(_key(self._token, self._challenge, nonce), is_caller=False)
        frame = self._wire.take(self._buffer, _NONCE, longest=_LONGEST)
        if frame is None:
            return None
        said = json.loads(frame[0])  # newer versions may say more
        return Greeting(int(said["rank"]), said["process"], str(said["version"]))

    def welcome(self) -> tuple[socket.socket, Wire]:
        """Answer the greeting; return the connection and its wire, ready to use."""
        assert self._wire is not None
        text = text_of(json.dumps({"version": VERSION}).encode())
        self.connection.settimeout(None)
        self.connection.sendall(self._wire.head(text) + text.data)
        return tune(self.connection), self._wire


def greet(connection: socket.socket, token: str, greeting: Greeting) -> tuple[Wire, str]:
    """Greet rank 0; return the connection's wire and the version that rank 0 welcomes with.

    Rank 0 sends a random challenge; the rank answers with random bytes of its own and its greeting;
    rank 0 welcomes it. The greeting and the welcome are the first messages of the connection. Their
    key is made from the run's token and both random texts, so a greeting is good for one connection
    only. Until then a connection may be a stranger's: few are held at a time, each for seconds.

    Raises:
        ValueError: the other end is not rank 0.
        ConnectionError: the connection closed.
    """
    challenge, nonce = bytearray(), secrets.token_bytes(_NONCE)
    while len(challenge) < _NONCE:
        challenge += _received(connection, _NONCE - len(challenge))
    wire = Wire(_key(token, bytes(challenge), nonce), is_caller=True)
    text = text_of(json.dumps(greeting._asdict()).encode())
    connection.sendall(nonce + wire.head(text) + text.data)
    buffer = bytearray()
    while (frame := wire.take(buffer, longest=_LONGEST)) is None:
        buffer += _received(connection, num_missing(buffer))  # and nothing of what follows
    return wire, str(json.loads(frame[0])["version"])


def tune(connection: socket.socket) -> socket.socket:
    """Return the connection, ready for messages."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _key(token: str, challenge: bytes, nonce: bytes) -> bytes:
    return hmac.digest(token.encode(), b"evenstep" + challenge + nonce, "sha256")


def _received(connection: socket.socket, most: int) -> bytes:
    data = connection.recv(most)
    if not data:
        raise ConnectionError("the connection closed")
    return data


class Acceptor:
    """Lets connections in that greet with the run's token, and keeps strangers few.

    Every newcomer has five seconds to greet, and all are read at the same time, so a stranger
    that sends nothing, or a byte now and then, delays no rank. Where strangers are more than 64,
    the oldest newcomer is turned away for the next one. One whose answer waits to be read is kept:
    in a flood, that is how a rank comes through.

    Args:
        token: what a greeting has to know.
        selector: reports when a newcomer can be read; the newcomer is the key's ``data``.
        num_ranks: how many may come at the same time.

    Attributes:
        problem: why a connection could not be accepted, as where too many files are open.
    """

    def __init__(self, token: str, selector: selectors.BaseSelector, *, num_ranks: int) -> None:
        self._token = token
        self._selector = selector
        self._most = _STRANGERS + num_ranks
        self._since_s: dict[PendingPeer, float] = {}  # the oldest first
        self._paused: selectors.SelectorKey | None = None
        self.problem: OSError | None = None

    def accept(self, server: socket.socket, now_s: float) -> None:
        """Accept the connections that wait, and send each its challenge."""
        for number in range(self._most):
            try:
                connection, _ = server.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if number == 0:  # later ones may be due to what was just accepted
                    self._cannot_accept(server, error)
                return
            try:
                pending = PendingPeer(connection, self._token)
            except OSError:
                connection.close()
                continue
            self._since_s[pending] = now_s
            self._selector.register(connection, selectors.EVENT_READ, pending)
            if len(self._since_s) > self._most:
                self._make_room("there are too many")

    def let_in(self, pending: PendingPeer) -> tuple[Greeting, Peer] | None:
        """Welcome a newcomer that has greeted, which is no longer read here; return it.

        None if it has not said all, or was turned away.
        """
        try:
            if (greeting := pending.read()) is None:
                return None
            connected = pending.welcome()
        except Exception as error:  # strangers send anything
            self.turn_away(pending, str(error))
            return None
        del self._since_s[pending]
        self._forget(pending)
        return greeting, Peer(*connected, process=greeting.process)

    def turn_away(self, pending: PendingPeer, reason: str) -> None:
        """Close the connection of a newcomer."""
        logging.getLogger("evenstep").debug("A connection to rank 0 was refused: %s.", reason)
        if self._since_s.pop(pending, None) is not None:
            self._forget(pending)
        pending.connection.close()

    def clear(self, now_s: float) -> None:
        """Turn newcomers away that have had their time to greet; accept again after a problem."""
        if self._paused is not None:
            paused, self._paused = self._paused, None
            self._selector.register(paused.fileobj, paused.events, paused.data)
        for pending, since_s in tuple(self._since_s.items()):
            if now_s - since_s <= _GREETING_S:
                return
            self.turn_away(pending, f"it did not greet within {_GREETING_S:g} s")

    def close(self) -> None:
        """Turn all newcomers away."""
        for pending in tuple(self._since_s):
            self.turn_away(pending, "all ranks have connected")

    def _make_room(self, reason: str) -> None:
        """Turn the oldest newcomer away of those that have said nothing, if there are any."""
        silent = (one for one in self._since_s if not one.has_answered())
        self.turn_away(next(silent, next(iter(self._since_s))), reason)

    def _cannot_accept(self, server: socket.socket, error: OSError) -> None:
        """Make room where too many files are open; with none to make, look again in a while."""
        if self._since_s:
            self._make_room(str(error))
        else:
            self.problem, self._paused = error, self._selector.unregister(server)

    def _forget(self, pending: PendingPeer) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(pending.connection)


_LOOK_S = 0.5  # between two looks at which newcomers have not greeted
_TRY_S = 10.0  # for one address
_RETRY_S = 0.1  # between two tries where rank 0 turned the connection away
_BACKLOG = 1024  # in a flood, a call that finds no place there is made again after a second
_BUSY_S = 10.0  # for which a run that has just ended may still hold a port
_ANY = (0,)
_TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)


def loopback() -> str:
    """Return the address by which this host reaches itself: IPv6's where it has no other."""
    try:
        socket.create_server(("127.0.0.1", 0)).close()
    except OSError:
        return "::1"
    return "127.0.0.1"


def listen(
    addresses: Sequence[str], ports: Sequence[int], *, backlog: int, timeout_s: float
) -> socket.socket:
    """Return a socket that listens, for the caller to close.

    Where all ranks know rank 0 by one address of this host, it listens there alone; else at all
    of its addresses, by IPv6 as well as by IPv4.

    Args:
        addresses: host names or addresses by which the ranks try to reach rank 0.
        ports: to take the first free one of; 0 is any.
        backlog: connections that may wait to be accepted.
        timeout_s: how long to try while all of the ports are in use.

    Raises:
        ConnectionError: none of the ports can be listened at.
    """
    where = _only_address(addresses)
    deadline_s = monotonic() + timeout_s
    while True:
        for port in ports:
            try:
                return _bound(where, port, backlog)
            except OSError as error:
                problem = error
        if problem.errno != errno.EADDRINUSE or monotonic() > deadline_s:
            tried = f"{ports[0]}" if len(ports) == 1 else f"{ports[0]} to {ports[-1]}"
            raise ConnectionError(
                f"`Runtime(ports=...)` must have a port that rank 0 can listen at, got {tried}: "
                f"{problem.strerror}. Give another one, or a range such as `range(29600, 29700)`."
            ) from problem
        sleep(_RETRY_S)


def interface_address(name: str) -> str | None:
    """Return the address of a network interface of this host, the IPv4 one where it has both.

    None where there is no interface of that name, or it has no address that other hosts reach:
    link-local ones of IPv6 mean something on one host alone.
    """
    import psutil  # type: ignore[import-untyped]  # what trains needs it anyway

    families = socket.AF_INET, socket.AF_INET6
    found = [
        ipaddress.ip_address(entry.address)
        for entry in psutil.net_if_addrs().get(name, ())
        if entry.family in families
    ]
    usable = [one for one in found if one.version == 4 or not one.is_link_local]
    return str(min(usable, key=lambda one: one.version)) if usable else None


def _only_address(addresses: Sequence[str]) -> str:
    """Return the one address by which rank 0 is known; "" where there are more, or names."""
    known = {loopback() if address == "localhost" else address for address in addresses}
    try:
        return str(ipaddress.ip_address(known.pop())) if len(known) == 1 else ""
    except ValueError:
        return ""


def _bound(where: str, port: int, backlog: int) -> socket.socket:
    if where:
        family = socket.AF_INET6 if ":" in where else socket.AF_INET
        try:
            return socket.create_server((where, port), family=family, backlog=backlog)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:  # else the ranks reach this host through another
                raise
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog
            )
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                raise  # else it is compiled in, and switched off
    return socket.create_server(("", port), backlog=backlog)


class Meeting(NamedTuple):
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

    Rank 0 sends the others its addresses, the port and a random token through ``share``. It
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
        ProtocolError: ranks run different versions of evenstep.
    """
    if rank != 0:
        shared = share(None)
        if "problem" in shared:
            raise ConnectionError(shared["problem"])
        meeting = Meeting(**{name: shared[name] for name in Meeting._fields})
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
        share(meeting._asdict())
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
                was_turned_away |= isinstance(error, ConnectionAbortedError)
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
            first = tuple(dict.fromkeys((address, *meeting.addresses)))
            return meeting._replace(addresses=first), None
    return meeting, _unreachable(meeting, rank, problems)


def _agree(collect: Callable[[Any], list[Any]], problem: str | None) -> None:
    """Raise on all ranks if one of them has a problem: rank 0 would wait for it."""
    for found in collect(problem):
        if found is not None:
            raise ConnectionError(found)


def _unreachable(meeting: Meeting, rank: int, problems: Sequence[str]) -> str:
    return (
        f"Rank {rank} cannot reach rank 0 on port {meeting.port}; tried {'; '.join(problems)}. "
        f"Name an address of rank 0 that all can reach with `Runtime(address=...)`."
    )


def _call(meeting: Meeting, address: str, greeting: Greeting, deadline_s: float) -> Peer:
    left_s = max(0.1, min(_TRY_S, deadline_s - monotonic()))
    connection = socket.create_connection((address, meeting.port), timeout=left_s)
    try:
        connection.settimeout(max(0.1, deadline_s - monotonic()))
        try:
            wire, version = greet(connection, meeting.token, greeting)
        except ConnectionError as error:  # closed by the other end, before it answered
            raise ConnectionAbortedError(str(error)) from error
        check_versions({0: version, greeting.rank: greeting.version})
    except BaseException:
        connection.close()
        raise
    return Peer(tune(connection), wire, process=meeting.process)


def _accept_all(
    server: socket.socket, world_size: int, meeting: Meeting, timeout_s: float
) -> dict[int, Peer]:
    """Let all ranks in, whatever else connects."""
    peers: dict[int, Peer] = {}
    deadline_s = monotonic() + timeout_s
    server.setblocking(False)
    with selectors.DefaultSelector() as selector:
        acceptor = Acceptor(meeting.token, selector, num_ranks=world_size)
        selector.register(server, selectors.EVENT_READ, None)
        try:
            while len(peers) < world_size - 1:
                left_s = deadline_s - monotonic()
                if left_s <= 0:
                    raise _missing(peers, world_size, meeting, timeout_s)
                if acceptor.problem is not None and acceptor.problem.errno in _TOO_MANY_FILES:
                    raise ConnectionError(
                        f"Rank 0 needs {world_size - 1} connections and cannot open that many "
                        f"({acceptor.problem.strerror}). Raise `ulimit -n` on its host."
                    )
                for key, _ in selector.select(min(left_s, _LOOK_S)):
                    if key.data is None:
                        acceptor.accept(server, monotonic())
                    else:
                        _let_in(acceptor, key.data, peers)
                acceptor.clear(monotonic())
        except BaseException:
            for connected in peers.values():
                connected.close()
            raise
        finally:
            acceptor.close()
    return peers


def _let_in(acceptor: Acceptor, pending: PendingPeer, peers: dict[int, Peer]) -> None:
    """Let a newcomer in if it has said which rank it is.

    Raises:
        ProtocolError: a rank runs another version of evenstep; it is sent this one.
    """
    if (connected := acceptor.let_in(pending)) is None:
        return
    said, peer = connected
    if (earlier := peers.get(said.rank)) is not None:  # one that the rank gave up
        earlier.close()
    peers[said.rank] = peer
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
