"""A rank that waits for one which is lost or hangs hears of it, wherever it waits."""

import socket
import threading
from dataclasses import replace
from queue import Queue

import pytest

from evenstep._exchange._exchange import Exchange
from evenstep._planner import Job, Planner
from evenstep.events import WorkerLost
from evenstep.exceptions import WorkerLostError

from .channels import channel_over
from .exchanges import PLAIN, Shifting, alone, pairs, report, reports_of

STUCK = replace(PLAIN, is_stuck=lambda thread_id: True)


@pytest.fixture
def star():
    """Two exchanges over a pair of sockets, with what rank 0 emitted."""
    with pairs() as make:
        yield make


def test_a_lost_worker_is_an_error_for_everybody_who_waits():
    """With its rank and host, and an event on rank 0."""
    one, other = socket.socketpair()
    emitted = Queue()
    channel = channel_over({1: one}, heartbeat_s=0.05, deadline_s=5.0)
    exchange = Exchange(0, ["a", "b"], channel, framework=PLAIN, emit=emitted.put)
    exchange.start()
    exchange.lead(Planner(Shifting(), Job(2, 16)))
    exchange.at(0)
    report(exchange, 0, reports_of(0, 0, 8))
    other.close()

    with pytest.raises(WorkerLostError, match=r"Rank 1 on b was lost.*last checkpoint") as caught:
        exchange.at(1)
    exchange.close()

    assert caught.value.rank == 1
    assert isinstance(emitted.get(timeout=1), WorkerLost)


def test_a_rank_that_fails_in_the_middle_of_a_report_is_named(star):
    """It takes the step for reported, and no report of it ever comes."""
    both, _ = star()
    for rank in (0, 1):
        both[rank].at(0)
    report(both[0], 0, reports_of(0, 0, 8))

    both[1].last_step = 0  # and there it was interrupted
    both[1].lost_ranks.script_failed(KeyboardInterrupt())
    both[1].close()
    closing = threading.Timer(5, both[0].close)  # or it would wait for ever
    closing.start()

    with pytest.raises(WorkerLostError, match=r"Rank 1 on b was lost: it raised KeyboardInterrupt"):
        both[0].at(1)
    closing.cancel()


def test_a_thread_that_waits_hears_that_the_run_was_closed(star):
    """One that fetches ahead for a loop which was left early: it would keep the process alive."""
    both, _ = star()
    both[1].at(0)
    heard = Queue()

    def fetch():
        try:
            both[1].at(1, trains=False)
        except RuntimeError as error:
            heard.put(str(error))

    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    wait_for(lambda: both[1]._awaited[False] == 0)
    both[1].close()

    assert heard.get(timeout=5) == "The balancer was closed, and with it this loader."
    thread.join(5)


def test_a_main_thread_stuck_in_a_collective_is_ended():
    """It would wait for half an hour, and nothing can interrupt it."""
    ended = Queue()
    exchange, other = alone(grace_s=0.1, abort=ended.put, framework=STUCK)

    exchange.lost_ranks.enter_collective()
    other.close()

    assert "Rank 1 on b was lost" in ended.get(timeout=5)
    exchange.close()


def outlast_the_grace(exchange, other):
    """Break the connection, and let two ticks pass that know of it: the grace, of 0 s, is over."""
    ticks, tick = Queue(), exchange.tick
    exchange.tick = lambda: (tick(), ticks.put(exchange.lost_ranks.is_broken))
    other.close()
    while not ticks.get(timeout=5):
        pass
    ticks.get(timeout=5)


def test_a_broken_collective_whose_error_is_handled_ends_nobody():
    """The handler may be saving a checkpoint: it runs outside of the backward."""
    ended = Queue()
    exchange, other = alone(grace_s=0.0, abort=ended.put)

    exchange.lost_ranks.enter_collective()  # and never left: an error was raised in there
    outlast_the_grace(exchange, other)

    assert ended.empty()
    assert exchange.lost_ranks.verdict(within_s=1).rank == 1
    exchange.close()


def test_outside_of_a_collective_nobody_is_ended():
    """An evaluation or a checkpoint may finish; the next step raises the error."""
    ended = Queue()
    exchange, other = alone(grace_s=0.0, abort=ended.put, framework=STUCK)

    exchange.lost_ranks.enter_collective()
    exchange.lost_ranks.leave_collective()
    outlast_the_grace(exchange, other)

    assert ended.empty()
    with pytest.raises(WorkerLostError, match="Rank 1 on b"):
        exchange.lost_ranks.check()
    exchange.close()


def wait_for(condition):
    """Wait until something that other threads bring about holds."""
    done = threading.Event()
    deadline = threading.Timer(10, done.set)
    deadline.start()
    while not condition() and not done.is_set():
        done.wait(0.01)
    deadline.cancel()
    assert condition()


def test_a_rank_that_hangs_is_an_error_where_it_is_waited_for(star):
    """Its heartbeats go on; past `hang_s` the others hear who it is, and where."""
    both, emitted = star(hang_s=0.5)
    for rank in (0, 1):
        both[rank].at(0)
    report(both[0], 0, reports_of(0, 0, 8))

    with pytest.raises(
        WorkerLostError, match=r"Rank 1 on b.*not finished step 0.*hang_s"
    ) as caught:
        both[0].at(1)

    assert "test_waiting.py" in str(caught.value)  # this very thread plays both ranks
    assert isinstance(emitted.get(timeout=5), WorkerLost)
    wait_for(lambda: both[1].lost_ranks.is_broken)
    with pytest.raises(WorkerLostError, match=r"Rank 1 on b"):
        both[1].lost_ranks.check()


def test_nobody_hangs_while_nobody_waits(star):
    """Between two steps all may take their time."""
    both, _ = star(hang_s=0.15)
    for rank in (0, 1):
        both[rank].at(0)
        report(both[rank], 0, reports_of(rank, 0, 8))
    looks = Queue()
    look, both[0]._progress.look = both[0]._progress.look, lambda: looks.put(look())
    found = [looks.get(timeout=5) for _ in range(10)]

    assert found == [None] * 10
    assert both[0].at(1) == both[1].at(1)


def test_a_policy_that_never_comes_back_is_noticed(star):
    """It runs where rank 0 sends its heartbeats."""
    both, _ = star(deadline_s=0.5)
    gate, planner = threading.Event(), both[0].decisions.planner
    observe = planner.observe

    def never(*args, **kwargs):
        gate.wait(30)
        return observe(*args, **kwargs)

    planner.observe = never
    for rank in (1, 0):
        both[rank].at(0)
        report(both[rank], 0, reports_of(rank, 0, 8))
    try:
        with pytest.raises(WorkerLostError, match=r"Rank 0 on a was lost.*silent") as caught:
            both[1].at(1)
    finally:
        gate.set()

    assert caught.value.rank == 0


@pytest.mark.parametrize("leaves_first", [True, False])
@pytest.mark.parametrize("trains", [True, False])
def test_an_answer_that_rank_0_never_gives_is_not_waited_for(star, trains, leaves_first):
    """A rank that fetches ahead may be no step further than rank 0, which raised."""
    (leaving, waiting), _ = star()
    for exchange in (leaving, waiting):
        exchange.at(0)

    def leave():
        leaving.lost_ranks.script_failed(ValueError("sample 17 has no label"))
        leaving.close()

    later = threading.Timer(0.0 if leaves_first else 0.3, leave)
    later.start()
    if leaves_first:
        later.join()
    with pytest.raises(WorkerLostError, match="it raised ValueError: sample 17 has no label"):
        waiting.at(2, trains=trains)
    later.join()


def test_a_thread_that_looks_ahead_at_the_end_of_a_run_loses_nothing(star):
    """Rank 0 came to its end without an error: so will the others."""
    (leaving, waiting), _ = star()
    for exchange in (leaving, waiting):
        exchange.at(0)

    def look_ahead():
        with pytest.raises(WorkerLostError, match="the test ends"):
            waiting.at(2, trains=False)

    ahead = threading.Thread(target=look_ahead)
    ahead.start()
    leaving.close()
    while 0 not in waiting.lost_ranks.left:
        ahead.join(0.01)
    waiting.lost_ranks.check_left()

    assert not waiting.lost_ranks.is_broken
    waiting.lost_ranks.lose(0, "the test ends")
    ahead.join()
