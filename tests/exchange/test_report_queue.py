"""Reports leave on the channel's thread; those that no plan waits for are held, and go together."""

import socket
import threading

import pytest

from evenstep._exchange._exchange import ReportQueue
from evenstep._exchange._message_kinds import HoldNothing, StepReports, read
from evenstep._exchange._wire import Peer, Wire

from .channels import AllThere, Listener, channel_over, router


class Owner(AllThere):
    """Notes who is lost."""

    def __init__(self):
        self.lost = []

    def lose(self, rank, problem):
        self.lost.append(rank)


OWNER = Owner()


def report(step):
    """What makes the report of a rank without a measurement."""
    return lambda: [StepReports(step, ())]


@pytest.fixture
def reports():
    """Rank 1's reports, with what rank 0 has been sent since the last look."""
    one, other = socket.socketpair()
    channel = channel_over({0: one}, heartbeat_s=60.0, deadline_s=200.0)
    channel.start(Listener())
    peer = Peer(other, Wire(b"", is_caller=False))
    OWNER.lost.clear()
    there = router(1, 2, channel, OWNER)

    def steps():
        """Return the steps of the reports in each message."""
        done = threading.Event()
        channel.call_soon(done.set)  # after what was to be sent
        assert done.wait(10)
        other.setblocking(False)
        messages = [read(rows) for rows in peer.receive() or []]
        return [[getattr(one, "step", one) for one in message] for message in messages]

    yield ReportQueue(there), steps
    channel.close()
    peer.close()


def test_what_is_not_due_goes_with_the_next_that_is(reports):
    """In the order in which it came."""
    reports, sent = reports

    reports.add(report(0), is_due=False)
    reports.add(report(1), is_due=False)
    assert sent() == []
    reports.add(report(2), is_due=True)
    assert sent() == [[0, 1, 2]]
    reports.add(report(3), is_due=True)

    assert sent() == [[3]]


def test_a_flush_sends_what_is_held_once(reports):
    """As every heartbeat does."""
    reports, sent = reports

    reports.add(report(0), is_due=False)
    reports.flush()
    reports.flush()

    assert sent() == [[0]]


def test_once_another_rank_has_asked_nothing_is_held(reports):
    """It cannot tell which batch it has before it hears of the others'."""
    reports, sent = reports

    reports.add(report(0), is_due=False)
    reports.received(0, HoldNothing())
    assert sent() == [[0]]
    reports.add(report(1), is_due=False)

    assert sent() == [[1]]


def test_a_report_is_made_when_it_is_sent(reports):
    """So that several are made in a row, by the channel's thread, and training goes on."""
    reports, sent = reports
    made = []

    def make(step):
        made.append((step, threading.current_thread().name))
        return report(step)()

    reports.add(lambda: make(0), is_due=False)
    assert made == []
    reports.add(lambda: make(1), is_due=True)

    assert sent() == [[0, 1]]
    assert made == [(0, "evenstep-channel"), (1, "evenstep-channel")]


def test_a_report_that_cannot_be_made_ends_the_run_by_name(reports):
    """Others wait for it."""
    reports, sent = reports

    def fails():
        raise ZeroDivisionError("a bug of ours")

    reports.add(fails, is_due=True)
    (lost,) = sent()

    assert [(one.rank, "ZeroDivisionError" in one.problem) for one in lost] == [(1, True)]
    assert OWNER.lost == [1]
