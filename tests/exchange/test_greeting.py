"""A greeting is good for one connection; ranks of unlike versions refuse each other by name.

A flood of strangers at rank 0's port keeps out no rank that answers in time.
"""

import contextlib
import errno
import json
import selectors
import socket
import threading

import pytest

from evenstep._exchange._greeting import Acceptor, Greeting, PendingPeer, greet
from evenstep._exchange._meeting import Meeting, connect_star, dial
from evenstep._exchange._wire import VERSION, ProtocolError, text_of

from .channels import close_all, rendezvous


class Tap:
    """Stands between a rank and rank 0, and keeps what the rank sends."""

    def __init__(self, port):
        self._server = socket.create_server(("127.0.0.1", 0))
        self._ends = []
        self.port, self.heard = self._server.getsockname()[1], b""
        self._threads = [threading.Thread(target=self._relay, args=(port,))]
        self._threads[0].start()

    def _relay(self, port):
        connection, _ = self._server.accept()
        onward = socket.create_connection(("127.0.0.1", port))
        self._ends += connection, onward
        back = threading.Thread(target=self._copy, args=(onward, connection))
        self._threads.append(back)
        back.start()
        self._copy(connection, onward, keep=True)

    def _copy(self, source, target, *, keep=False):
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                if keep:
                    self.heard += data
                target.sendall(data)

    def close(self):
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for end in (*self._ends, self._server):
            end.close()


def test_a_replayed_greeting_is_refused():
    """All that rank 1 has sent, sent again by a stranger while rank 0 waits for rank 2."""
    share, stars, taps = rendezvous(3), {}, []

    def through_a_tap(value):
        meeting = share(value)
        taps.append(Tap(meeting["port"]))
        return {**meeting, "port": taps[0].port}

    def join(rank, share):
        stars[rank] = connect_star(rank, 3, share, addresses=["127.0.0.1"])

    threads = [threading.Thread(target=join, args=(0, share))]
    threads[0].start()
    join(1, through_a_tap)
    with socket.create_connection(("127.0.0.1", share(None)["port"])) as stranger:
        stranger.sendall(taps[0].heard)
        stranger.settimeout(10)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while data := stranger.recv(4096):
                answer += data
    join(2, share)
    threads[0].join(20)
    stars[1][0].send(text_of(b"n 1"))

    assert len(answer) <= 16, "the challenge, and no welcome"
    assert stars[0][1].receive() == [b"n 1"]
    close_all(stars)
    taps[0].close()


PACKAGE, PROTOCOL = VERSION.split(" ", 1)
UNLIKE = pytest.mark.parametrize("other", [f"99.0 {PROTOCOL}", f"{PACKAGE} (protocol 99)"])


@UNLIKE
def test_a_rank_of_another_version_ends_the_start_on_both(other):
    """With both versions, of the package and of the protocol, and not as one that never came."""
    share, errors = rendezvous(2), []

    def join():
        meeting = share(None)
        with socket.create_connection(("127.0.0.1", meeting["port"])) as connection:
            _, version = greet(connection, meeting["token"], Greeting(1, None, version=other))
            errors.append(version)

    thread = threading.Thread(target=join)
    thread.start()
    with pytest.raises(ProtocolError) as caught:
        connect_star(0, 2, share, addresses=["127.0.0.1"])
    thread.join(10)

    assert f"got {VERSION} on rank 0 and {other} on rank 1. Install" in str(caught.value)
    assert errors == [VERSION]


@UNLIKE
def test_rank_zero_of_another_version_is_named(other):
    """At once, by the rank that reaches it."""

    def answer():
        connection, _ = server.accept()
        newcomer = PendingPeer(connection, "t")
        while newcomer.read() is None:
            pass
        text = text_of(json.dumps({"version": other}).encode())
        connection.sendall(newcomer._wire.head(text) + text.data)
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer)
        thread.start()
        meeting = Meeting(("127.0.0.1",), server.getsockname()[1], "t", None)
        with pytest.raises(ProtocolError) as caught:
            dial(meeting, 1, timeout_s=10)
        thread.join(10)

    assert f"got {other} on rank 0 and {VERSION} on rank 1. Install" in str(caught.value)


def test_a_rank_that_is_turned_away_comes_again():
    """A crowd of strangers may have pushed it out of the door."""
    num_calls = []

    def answer():
        for turn_away in (True, True, False):
            connection, _ = server.accept()
            num_calls.append(1)
            newcomer = PendingPeer(connection, "t")
            while not turn_away and newcomer.read() is None:
                pass
            if not turn_away:
                newcomer.welcome()
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer)
        thread.start()
        meeting = Meeting(("127.0.0.1",), server.getsockname()[1], "t", None)
        dial(meeting, 1, timeout_s=20).close()
        thread.join(10)

    assert len(num_calls) == 3


class Full:
    """A server with too many files open to accept anybody."""

    def accept(self):
        raise OSError(errno.EMFILE, "Too many open files")


@pytest.fixture
def flooded():
    """An acceptor, its server, a rank that has answered there, and strangers who wait behind it."""
    with contextlib.ExitStack() as opened:
        server = opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=256))
        server.setblocking(False)
        selector = opened.enter_context(selectors.DefaultSelector())
        acceptor = Acceptor("t", selector, num_ranks=2)
        opened.callback(acceptor.close)

        def call():
            return opened.enter_context(socket.create_connection(server.getsockname()))

        rank, welcomes = call(), []
        thread = threading.Thread(
            target=lambda: welcomes.append(greet(rank, "t", Greeting(1, None))[1])
        )
        acceptor.accept(server, 0.0)
        thread.start()
        ((key, _),) = selector.select(timeout=20)  # its answer is there, and is not read yet
        for _ in range(200):
            call()
        yield acceptor, server, key.data
        connected, _ = acceptor.let_in(key.data)
        opened.callback(connected.close)
        thread.join(20)
        assert welcomes == [VERSION]


def test_a_rank_that_has_answered_is_not_turned_away_for_strangers(flooded):
    """Three times as many strangers as there are places come before its answer is read."""
    acceptor, server, rank = flooded
    for _ in range(4):
        acceptor.accept(server, 0.0)

    assert acceptor.read(rank) == Greeting(1, None)


def test_nor_where_too_many_files_are_open(flooded):
    """A stranger goes, to make room for others."""
    acceptor, server, rank = flooded
    acceptor.accept(server, 0.0)
    acceptor.accept(Full(), 0.0)

    assert acceptor.read(rank) == Greeting(1, None)
