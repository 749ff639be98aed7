"""What the kernel counts of a process's own TCP connections, over the machine's own loop."""

import os
import socket
import struct
from contextlib import ExitStack

import pytest

from evenstep._host import LinkReader, TcpCounts

pytestmark = pytest.mark.skipif(
    not os.path.isdir("/proc/self/fd") or not hasattr(socket, "TCP_INFO"), reason="needs Linux"
)
NUM_BYTES = 1 << 20


@pytest.fixture
def pair():
    """Both ends of a connection in this process."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        client = stack.enter_context(socket.create_connection(server.getsockname()))
        other, _ = server.accept()
        yield client, stack.enter_context(other)


class ByHand:
    """A clock that stands still until it is moved."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def carry(sender, receiver, num_bytes=NUM_BYTES):
    """Send so much, and wait until it is there."""
    for _ in range(num_bytes // 4096):
        sender.sendall(bytes(4096))
        left = 4096
        while left:
            left -= len(receiver.recv(left))


def ends(one):
    return tuple("{}:{}".format(*name) for name in (one.getsockname(), one.getpeername()))


def between(found, *sockets):
    return [one for one in found if (one.here, one.there) in [ends(each) for each in sockets]]


def test_both_ends_tell_of_what_was_carried_since_the_last_look(pair):
    """One has sent it; the other names the same two addresses the other way around."""
    clock = ByHand()
    reader = LinkReader(now=clock, is_link=lambda one: True)
    carry(*pair)
    sent, got = sorted(between(reader.read(), *pair), key=lambda one: -one.acked_bytes)

    assert (sent.here, sent.there) == (got.there, got.here) == ends(pair[0])
    assert NUM_BYTES / 2 < sent.acked_bytes <= NUM_BYTES + 1
    assert sent.num_segments > 0
    assert sent.busy_us >= sent.reader_us >= 0
    assert got.acked_bytes <= 1

    assert reader.read() == ()  # it looks every few seconds
    clock.now_s += 3600
    assert between(reader.read(), *pair) == []
    carry(*pair)
    clock.now_s += 3600
    again = max(one.acked_bytes for one in between(reader.read(), *pair))
    assert again <= 1.5 * NUM_BYTES + 1


def test_what_stays_inside_a_host_is_no_link(pair):
    """Ranks of one host reach each other without its link."""
    carry(*pair)
    assert between(LinkReader().read(), *pair) == []


def test_looking_changes_nothing_of_a_socket(pair):
    """Neither whether it blocks nor how long it waits; and no descriptor is left over."""
    pair[0].setblocking(False)
    num_before = len(os.listdir("/proc/self/fd"))
    LinkReader(is_link=lambda one: True).read()

    assert not os.get_blocking(pair[0].fileno())
    assert os.get_blocking(pair[1].fileno())
    assert len(os.listdir("/proc/self/fd")) == num_before
    pair[1].sendall(b"still there")
    pair[0].setblocking(True)
    assert pair[0].recv(11) == b"still there"


def test_a_connection_that_is_gone_is_forgotten(pair):
    """And one that was never connected is no error."""
    reader = LinkReader(now=(clock := ByHand()), is_link=lambda one: True)
    carry(*pair)
    with socket.socket():
        assert len(between(reader.read(), *pair)) == 2
    names = [ends(one) for one in pair]
    for one in pair:
        one.close()
    clock.now_s += 3600
    assert [one for one in reader.read() if (one.here, one.there) in names] == []


def test_an_older_kernel_counts_less_and_nothing_is_known():
    """All fields lie where Linux has them, and its newer ones behind."""
    info = bytearray(240)
    struct.pack_into("=I", info, 100, 3)
    struct.pack_into("=QQ", info, 120, 10**10, 7)
    struct.pack_into("=I", info, 156, 11)
    struct.pack_into("=QQ", info, 168, 5_000_000, 2_000_000)

    expected = TcpCounts(10**10, 7, 5_000_000, 2_000_000, 11, 3)
    assert TcpCounts.of(bytes(info)) == TcpCounts.of(bytes(info[:184])) == expected
    assert TcpCounts.of(bytes(info[:183])) is None
    assert TcpCounts.of(b"") is None
