"""Reports that no plan waits for are held and travel together."""

import socket

import pytest

from evenstep._exchange._channel import StarChannel
from evenstep._exchange._decisions import Decisions
from evenstep._exchange._held_reports import HeldReports
from evenstep._exchange._message_kinds import HoldNothing, StepReports, read
from evenstep._exchange._peer import Peer
from evenstep._exchange._wire import Wire
from evenstep._planner import Job, Planner, Report
from evenstep.policies import Auto

from .channels import router
from .test_decisions import Ranks


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


def test_short_steps_are_decided_while_ranks_are_in_later_ones():
    """The answer that a step needs is there before the reports that the next plan follows from."""
    ranks, waited, dues = Ranks(), [], []
    publish = ranks.publish

    def published(index, through, due):
        dues.append((due, through))
        publish(index, through, due)

    ranks.publish = published
    decisions = Decisions(2, lag=0, answers=ranks, emit=ranks.events.append)
    decisions.planner = Planner(Auto(), Job(2, 16))
    ranks.announce(decisions.planner.plan)
    for step in range(200):
        waited.append(step not in ranks.answered)
        for rank in (0, 1):
            decisions.take(rank, step, [Report(step, 8, 16, 1e-3, 0.0, wall_s=3e-3)])

    assert ranks.answered == list(range(ranks.answered[-1] + 1))
    assert sum(waited) <= 3, "ranks waited for decisions"
    assert {through - due for due, through in dues[1:]} == {5}, "15 ms of steps"
    assert len(dues) <= 200 / 10
