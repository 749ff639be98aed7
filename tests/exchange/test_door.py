"""A flood of strangers at rank 0's port keeps out no rank that answers in time."""

import contextlib
import errno
import selectors
import socket
import threading

import pytest

from evenstep._exchange._door import Door
from evenstep._exchange._greeting import Greeting, greet


class Full:
    """A server with too many files open to accept anybody."""

    def accept(self):
        raise OSError(errno.EMFILE, "Too many open files")


@pytest.fixture
def flooded():
    """A door, its server, a rank that has answered there, and strangers who wait behind it."""
    with contextlib.ExitStack() as opened:
        server = opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=256))
        server.setblocking(False)
        selector = opened.enter_context(selectors.DefaultSelector())
        door = Door("t", selector, num_ranks=2)
        opened.callback(door.close)

        def call():
            return opened.enter_context(socket.create_connection(server.getsockname()))

        rank, welcomes = call(), []
        thread = threading.Thread(
            target=lambda: welcomes.append(greet(rank, "t", Greeting(1, 3, None))[1])
        )
        door.accept(server, 0.0)
        thread.start()
        ((key, _),) = selector.select(timeout=20)  # its answer is there, and is not read yet
        for _ in range(200):
            call()
        yield door, server, key.data
        connected, _ = door.let_in(key.data, 7)
        opened.callback(connected.close)
        thread.join(20)
        assert [welcome.num_received for welcome in welcomes] == [7]


def test_a_rank_that_has_answered_is_not_turned_away_for_strangers(flooded):
    """Three times as many strangers as there are places come before its answer is read."""
    door, server, rank = flooded
    for _ in range(4):
        door.accept(server, 0.0)

    assert door.read(rank) == Greeting(1, 3, None)


def test_nor_where_too_many_files_are_open(flooded):
    """A stranger goes, to make room for others."""
    door, server, rank = flooded
    door.accept(server, 0.0)
    door.accept(Full(), 0.0)

    assert door.read(rank) == Greeting(1, 3, None)
