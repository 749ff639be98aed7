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
    """What makes the report of a rank without a measurement."""
    return lambda: [StepReports(step, ())]


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


def test_a_report_is_made_when_it_is_sent(reports):
    """So that several are made in a row, and what a device was late with is in them."""
    reports, sent = reports
    made = []

    reports.add(lambda: made.append(0) or report(0)(), may_wait=True)
    assert made == []
    reports.add(lambda: made.append(1) or report(1)(), may_wait=False)

    assert made == [0, 1]
    assert sent() == [[0, 1]]


def test_only_so_many_are_held(reports):
    """The account of a step is kept for so many steps, and no more."""
    reports, sent = reports

    for step in range(40):
        reports.add(report(step), may_wait=True)

    assert sent() == [list(range(32))]
    assert reports.num_held == 8
