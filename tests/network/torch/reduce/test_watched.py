"""When ranges begin to arrive and when they are there, and what that says of the ways between."""

import threading
from contextlib import ExitStack, closing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep.network import traffic_bytes
from evenstep.network._following._link_tracker import Transfers
from evenstep.network._torch._pipeline import BucketJob, Flight, chunk_tag, is_pull
from evenstep.network._torch._reducer import ShardedReducer
from evenstep.network._torch._watched import (
    HEAD_BYTES,
    LEAST_BYTES,
    Arrival,
    WatchedTransport,
    covered,
    ways_to,
)
from evenstep.testing import run_workers

from . import runs
from .memory import MemoryTransport, Network, on_threads

HEAD = 1 << 29  # what the tag of the first bytes has more

spans = st.tuples(st.integers(0, 40), st.integers(0, 9)).map(lambda span: (span[0], sum(span)))
some = st.lists(spans, max_size=12)


@given(some)
def test_every_moment_counts_once(given_spans):
    """As a count of the seconds in which something was under way, and of those in between."""
    seconds, pauses = covered(given_spans)
    under_way = {second for begin, end in given_spans for second in range(begin, end)}
    assert seconds == len(under_way)
    first = min((begin for begin, _ in given_spans), default=0)
    last = max((end for _, end in given_spans), default=0)
    assert seconds + sum(pauses) == last - first
    assert all(pauses)


@given(some.filter(len), st.integers(1000, 5000), st.integers(0, 1 << 16))
def test_pauses_count_as_far_as_a_link_may_save_up(given_spans, size, burst_bytes):
    """The answer solves its equation, and is the largest that does: found from above, dully."""
    arrivals = [Arrival(0, size, begin, end) for begin, end in given_spans]
    (_, _, num_bytes, way_s), all_of_it = ways_to(1, arrivals, burst_bytes=burst_bytes)
    assert all_of_it == (1, 1, num_bytes, way_s)
    seconds, pauses = covered(given_spans)
    expected_s = seconds + sum(pauses)
    for _ in range(5000):
        saved_s = burst_bytes / num_bytes * expected_s
        expected_s = seconds + sum(min(pause, saved_s) for pause in pauses)
    assert way_s == pytest.approx(expected_s, rel=1e-3, abs=1e-6)


def test_what_one_rank_got_of_the_others():
    """By sender and together; pauses count for bursts alone, bytes that mark a beginning do not."""
    arrivals = [
        Arrival(2, 1064, 0.0, 1.0),
        Arrival(2, 1064, 0.5, 1.5),  # a pull beside a push
        Arrival(0, 564, 3.0, 3.25),
        Arrival(2, 64, 7.5, 8.0),
    ]
    assert ways_to(3, arrivals, burst_bytes=0) == [
        (0, 3, 500, 0.25),
        (2, 3, 2000, 2.0),
        (3, 3, 2500, 2.25),
    ]
    # 1000 bytes each for the two of them: in the pause, half of the answer is saved up.
    assert ways_to(3, arrivals, burst_bytes=2000) == [
        (0, 3, 500, 0.25),
        (2, 3, 2000, 4.0),
        (3, 3, 2500, 8.0),
    ]

    transfers = Transfers.from_rows(4, ways_to(3, arrivals))
    assert transfers.num_bytes[2, 3] == 2000
    assert transfers.problem() is None


def test_parts_one_after_the_other_do_not_add_up_to_more_than_the_link():
    """Three senders in turn, each with the whole link of 1000 bytes/s for a third of the time."""
    turns = [(turn % 3, float(turn), turn + 1.0) for turn in range(9)]
    arrivals = [Arrival(peer, 1064, begin_s, end_s) for peer, begin_s, end_s in turns]
    rows = ways_to(3, arrivals, burst_bytes=0)
    transfers = Transfers.from_rows(4, rows)

    assert [num_bytes / seconds for *_, num_bytes, seconds in rows] == [1000] * 4
    assert transfers.rates()[1, 3] == 3000
    assert transfers.carried(1)[1].tolist() == [0, 0, 0, 1000]


def test_nothing_came():
    """A rank to which nobody sent anything has no rows."""
    assert ways_to(0, []) == []


class Hands:
    """A clock that stands still until it is moved."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def test_time_counts_from_the_first_bytes_to_the_last():
    """Not from when they were asked for, and not until somebody looks."""
    network, clock = Network(), Hands()
    here = WatchedTransport(MemoryTransport(network, 0, 2), clock=clock)
    other = MemoryTransport(network, 1, 2)
    sent, buffer = torch.arange(4096.0), torch.empty(4096)
    first, tag = HEAD_BYTES // 4, 64
    with closing(here):
        pending = here.receive(buffer, 1, tag)
        clock.now_s = 5.0  # the other end waits for somebody
        seen = _when_watched(here, 1)
        other.send(sent[:first], 0, tag + HEAD)
        seen("begin")
        clock.now_s = 7.0
        other.send(sent[first:], 0, tag)
        pending(5)
        clock.now_s = 100.0  # nobody looks before
        assert here.take_arrivals() == [Arrival(1, 16384, 5.0, 7.0)]
        assert here.take_arrivals() == []
    assert torch.equal(buffer, sent)


def _when_watched(transport, num_readings):
    """Return what waits until the watching thread has read the clock so many times."""
    clock, read = transport._clock, threading.Semaphore(0)

    def told():
        now_s = clock()
        read.release()
        return now_s

    transport._clock = told

    def wait(_):
        for _ in range(num_readings):
            assert read.acquire(timeout=5)

    return wait


def test_small_messages_go_as_they_are():
    """In one piece, to a rank that does not watch too."""
    network = Network()
    here, other = WatchedTransport(MemoryTransport(network, 0, 2)), MemoryTransport(network, 1, 2)
    sent = torch.arange(LEAST_BYTES / 4 - 1)
    buffer = torch.empty_like(sent)
    with closing(here):
        pending = here.receive(buffer, 1, 3)
        other.send(sent, 0, 3)
        pending(5)
        assert here.take_arrivals() == []
    assert torch.equal(buffer, sent)


def test_a_wait_that_fails_raises_where_it_is_waited_for():
    """The group is broken off while a watching thread waits."""
    network = Network()
    here = WatchedTransport(MemoryTransport(network, 0, 2))
    with closing(here):
        pending = here.receive(torch.empty(4096), 1, 64)
        here.break_off()
        with pytest.raises(RuntimeError, match="broken off"):
            pending(5)
        assert here.take_arrivals() == []


@pytest.mark.parametrize("taken", [HEAD, 0])
def test_a_send_is_done_when_both_of_its_parts_are(taken):
    """Whichever of them the other end takes alone."""
    network = Network()
    sent, size = torch.arange(4096.0), HEAD_BYTES // 4 if taken else 4096 - HEAD_BYTES // 4
    with closing(WatchedTransport(MemoryTransport(network, 0, 2))) as here:
        pending = here.send(sent, 1, 64)
        MemoryTransport(network, 1, 2).receive(torch.empty(size), 0, 64 + taken)
        with pytest.raises(RuntimeError, match="nobody at the other end"):
            pending(0.01)


def test_a_wait_has_a_limit():
    """Nobody sends, and nothing is broken: it says so."""
    network = Network()
    with closing(WatchedTransport(MemoryTransport(network, 0, 2))) as here:
        pending = here.receive(torch.empty(4096), 1, 64)
        with pytest.raises(RuntimeError, match="nothing came"):
            pending(0.01)
        here.break_off()


@pytest.mark.parametrize("shares", runs.SHARES)
def test_sums_are_the_same_and_every_byte_is_seen(shares):
    """Bit for bit those without watching, and what arrived is what the plan says."""
    split = runs.split_of(shares, 1, min_bytes=LEAST_BYTES)

    def go(network, *, watches):
        def one(rank):
            transport = MemoryTransport(network, rank, 4)
            with ExitStack() as stack:
                if watches:
                    transport = stack.enter_context(closing(WatchedTransport(transport)))
                reducer = stack.enter_context(ShardedReducer(transport, timeout_s=20))
                reducer.adopt(split)
                result = reducer.reduce(runs.randoms(rank, 30_011)).wait()
                reducer.settle()
                return result, transport.take_arrivals() if watches else []

        return on_threads(4, one)

    plain, watched = go(Network(), watches=False), go(Network(), watches=True)
    _, received = traffic_bytes(split, 30_011, 4, workers=range(4))
    for rank in range(4):
        assert torch.equal(watched[rank][0], plain[rank][0])
        assert sum(one.num_bytes for one in watched[rank][1]) == received[rank]


def test_a_tag_says_whether_it_is_a_pull():
    """As `chunk_tag` makes them."""
    for number in (0, 5, (1 << 21) - 1):
        for epoch in (0, 77):
            flight = _flight(number, epoch)
            for pull in (False, True):
                assert is_pull(chunk_tag(flight, pull=pull)) == pull
                assert chunk_tag(flight, pull=pull) < 1 << 29


def _flight(number, epoch):
    job = BucketJob(None, 4, torch.float32, runs.split_of((1.0,), epoch), lambda error: None)
    return Flight(job, number, (0, 4))


@pytest.mark.cluster
def test_over_gloo_between_processes():
    """Same sums, all bytes seen, and all of it within the exchange."""
    for rank, found in enumerate(run_workers(3, runs.watched)):
        assert found["same"]
        assert found["bytes"] == found["planned"][rank]
        assert 0 < found["seconds"] <= found["within_s"]
