"""Reports leave on the channel's thread, and what rank 0 tells of waiting comes of them."""

import socket
import threading

import pytest

from evenstep._diagnosis import HostClues, Phase, StepClues
from evenstep._exchange._channel import Peer, Wire
from evenstep._exchange._decisions import Decisions, TimeBooks
from evenstep._exchange._exchange import ReportQueue
from evenstep._exchange._message_kinds import (
    HoldNothing,
    StepReports,
    TimesReport,
    read,
)
from evenstep.events import StepsAccounted, WaitingDiagnosed

from .exchanges import AllThere, Listener, channel_over, router


class Clock:
    """Says the time that it is told."""

    now_s = 0.0

    def __call__(self):
        return self.now_s


def row(*, input_us=0, waited_us=0):
    """One rank's times in a step of 100 ms."""
    found = [0] * len(Phase)
    found[Phase.BACKWARD] = 100_000
    found[Phase.INPUT], found[Phase.REDUCTION] = input_us, waited_us
    return found


def run(books, clock, steps, *, late):
    """Run steps in which rank ``late`` waits for input, and the other for it; None is neither."""
    for step in steps:
        clock.now_s += 0.15
        for rank in (0, 1):
            waits = late is not None and rank != late
            us = {"waited_us": 50_000} if waits else {"input_us": 50_000 * (rank == late)}
            is_enough = books.add(rank, TimesReport(step, row(**us)))
        if is_enough:
            books.report()


@pytest.fixture
def told():
    return []


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def books(told, clock):
    return TimeBooks(2, emit=told.append, clock=clock)


def diagnoses(told):
    return [event for event in told if isinstance(event, WaitingDiagnosed)]


def test_a_cause_is_told_once_as_long_as_it_lasts(books, told, clock):
    """Steps are accounted for as before; the diagnosis comes with the first look."""
    run(books, clock, range(600), late=1)
    (only,) = diagnoses(told)

    assert (only.causes, only.ranks) == (("input",), (1,))
    assert 60 <= only.step <= 80
    assert sum(isinstance(event, StepsAccounted) for event in told) == 600


def test_another_cause_is_told_but_not_at_once(books, told, clock):
    """Two diagnoses are half a minute apart at least, and the last word is had at the end."""
    run(books, clock, range(100), late=1)
    run(books, clock, range(100, 1000), late=0)
    books.end()
    found = diagnoses(told)

    assert found[0].ranks == (1,)
    assert found[-2].ranks == (0,)
    assert found[1].step - found[0].step >= 190  # of 0.15 s
    assert found[-1].num_steps == 997


def test_the_end_says_it_where_there_is_nothing_to_say(books, told, clock):
    """Of a run of a few steps alone it does not; and it does once."""
    run(books, clock, range(5), late=None)
    books.end()
    assert diagnoses(told) == []

    again = TimeBooks(2, emit=told.append, clock=clock)
    run(again, clock, range(50), late=None)
    again.end()
    again.end()
    (only,) = diagnoses(told)

    assert only.causes == ()
    assert "which is little" in only.no_verdict


def loops(books, clock, *, clues=lambda step: None, host=None):
    """Run 100 steps in which rank 1 computes half as long again: what it noticed comes before."""
    for step in range(100):
        clock.now_s += 0.15
        times = row(waited_us=50_000), row()
        times[1][Phase.FORWARD] = 50_000
        books.add(0, TimesReport(step, times[0], host=host and HostClues(step, 0.15)))
        is_enough = books.add(1, TimesReport(step, times[1], clues(step), host))
        if is_enough:
            books.report()
    books.end()


@pytest.mark.parametrize(
    ("clues", "host", "cause", "words"),
    [
        (lambda step: None, None, "slow worker", "throughout"),
        (lambda step: StepClues(gc_us=50_000), None, "garbage collection", "garbage collector"),
        (lambda step: StepClues(compile_us=50_000), None, "compilation", "compiling"),
        (lambda step: None, HostClues(0, 0.15, throttled_s=0.05), "slow worker", "quota"),
        (lambda step: None, HostClues(0, 0.15, run_delay_s=0.05), "contention", "for a core"),
        (lambda step: None, HostClues(0, 0.15, major_faults=90), "memory pressure", "pages"),
    ],
)
def test_clues_name_what_times_alone_cannot(books, told, clock, clues, host, cause, words):
    """The same times, with what the rank noticed beside them."""
    loops(books, clock, clues=clues, host=host)
    last = diagnoses(told)[-1]

    assert (last.causes, last.ranks) == ((cause,), (1,))
    assert words in last.evidence[0]


@pytest.mark.parametrize(
    ("clue", "cause"),
    [
        (StepClues(gc_us=50_000), "garbage collection"),
        (HostClues(0, 0.15, run_delay_s=0.05), "contention"),
    ],
)
def test_clues_arrive_as_messages(told, clock, clue, cause):
    """Rank 1 computes half as long again; rank 0 waits for it."""

    class Soon:
        """Does at once what may be done later."""

        def later(self, call):
            call()

    decisions = Decisions(2, lag=0, answers=Soon(), emit=told.append, clock=clock)
    for step in range(50):
        noticed = clue if isinstance(clue, StepClues) else None
        host = clue if isinstance(clue, HostClues) else HostClues(step, 0.15)
        for rank, (computed, waited) in enumerate([(100_000, 50_000), (150_000, 0)]):
            spent_us = (0, computed, *[0] * 5, waited, 0, 0, 0)
            found = (noticed, host) if rank == 1 else (None, HostClues(step, 0.15))
            decisions.received(rank, TimesReport(step, spent_us, *found))
    decisions.end()
    (last,) = diagnoses(told)

    assert (last.causes, last.ranks) == ((cause,), (1,))


def test_clues_of_steps_that_are_never_complete_are_dropped(books, told, clock):
    """One rank told no times of them; later steps are diagnosed as they are."""
    books.add(1, TimesReport(0, row(), StepClues(gc_us=50_000)))
    run(books, clock, range(1, 100), late=1)
    books.end()

    assert books._clues == {}
    assert diagnoses(told)[-1].causes == ("input",)


def test_one_rank_waits_for_no_other(told, clock):
    """No diagnosis of it."""
    books = TimeBooks(1, emit=told.append, clock=clock)
    for step in range(50):
        books.add(0, TimesReport(step, row()))
    books.end()

    assert diagnoses(told) == []
    assert len(told) == 1


def test_a_diagnosis_that_raises_is_logged_once_and_the_account_goes_on(books, told, clock, caplog):
    """Here by times that no recorder writes: the account counts what the diagnosis cannot read."""
    run(books, clock, range(50), late=1)
    books.add(0, TimesReport(50, [*row(), 7]))
    books.add(1, TimesReport(50, [*row(), 7]))
    books.report()
    run(books, clock, range(51, 400), late=1)
    books.end()

    assert diagnoses(told) == []
    assert told[-1].step == 399
    (record,) = caplog.records
    assert "who waits for whom is not reported any more" in record.getMessage()


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
