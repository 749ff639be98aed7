"""Reports that no plan waits for are held and travel together."""

import socket

import pytest

from evenstep._exchange._channel import StarChannel
from evenstep._exchange._held_reports import HeldReports
from evenstep._exchange._peer import Peer
from evenstep._exchange._wire import Wire


@pytest.fixture
def reports():
    """Rank 1's reports, with what rank 0 has been sent since the last look."""
    one, other = socket.socketpair()
    channel = StarChannel({0: one}, heartbeat_s=1.0, deadline_s=5.0)
    peer = Peer(other, Wire(b"", is_caller=False))
    other.setblocking(False)
    yield HeldReports(channel), lambda: peer.receive() or []
    channel.close()
    peer.close()


def test_what_may_wait_goes_with_the_next_that_may_not(reports):
    """In the order in which it came."""
    reports, sent = reports
    reports.known_until = 1

    reports.add(0, {"step": 0})
    reports.add(1, {"step": 1})
    assert sent() == []
    reports.add(2, {"step": 2})
    reports.add(3, {"step": 3})

    assert sent() == [{"several": [{"step": 0}, {"step": 1}, {"step": 2}]}, {"step": 3}]


def test_what_is_urgent_goes_at_once(reports):
    """As where memory ran out, or a rank wants to stop."""
    reports, sent = reports
    reports.known_until = 9

    reports.add(0, {"step": 0}, urgent=True)

    assert sent() == [{"step": 0}]


def test_a_flush_sends_what_is_held_once(reports):
    """As every heartbeat does."""
    reports, sent = reports
    reports.known_until = 9

    reports.add(0, {"step": 0})
    reports.flush()
    reports.flush()

    assert sent() == [{"step": 0}]


def test_once_another_rank_has_asked_nothing_is_held(reports):
    """It cannot tell which batch it has before it hears of the others'."""
    reports, sent = reports
    reports.known_until = 9

    reports.add(0, {"step": 0})
    assert reports.received(0, {"hold": False})
    reports.add(1, {"step": 1})

    assert sent() == [{"step": 0}, {"step": 1}]
