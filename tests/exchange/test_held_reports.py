"""Reports that no plan waits for are held and travel together."""

import socket

import pytest

from evenstep._exchange._channel import StarChannel
from evenstep._exchange._held_reports import HeldReports
from evenstep._exchange._message_kinds import HoldNothing, StepReports, read
from evenstep._exchange._peer import Peer
from evenstep._exchange._wire import Wire

from .channels import router


def report(step):
    """What a rank without a measurement reports."""
    return [StepReports(step, ())]


@pytest.fixture
def reports():
    """Rank 1's reports, with what rank 0 has been sent since the last look."""
    one, other = socket.socketpair()
    channel = StarChannel({0: one}, heartbeat_s=1.0, deadline_s=5.0)
    peer = Peer(other, Wire(b"", is_caller=False))
    other.setblocking(False)
    there = router(1, 2, channel)

    def steps():
        """Return the steps of the reports in each message."""
        return [[one.step for one in read(rows)] for rows in peer.receive() or []]

    yield HeldReports(there), steps
    channel.close()
    peer.close()


def test_what_may_wait_goes_with_the_next_that_may_not(reports):
    """In the order in which it came."""
    reports, sent = reports

    reports.add(report(0), may_wait=True)
    reports.add(report(1), may_wait=True)
    assert sent() == []
    reports.add(report(2), may_wait=False)
    reports.add(report(3), may_wait=False)

    assert sent() == [[0, 1, 2], [3]]


def test_a_flush_sends_what_is_held_once(reports):
    """As every heartbeat does."""
    reports, sent = reports

    reports.add(report(0), may_wait=True)
    reports.flush()
    reports.flush()

    assert sent() == [[0]]


def test_once_another_rank_has_asked_nothing_is_held(reports):
    """It cannot tell which batch it has before it hears of the others'."""
    reports, sent = reports

    reports.add(report(0), may_wait=True)
    reports.received(0, HoldNothing())
    reports.add(report(1), may_wait=True)

    assert sent() == [[0], [1]]
