"""Reports in, plans out: numbered, the same on all ranks, in time."""

import socket
import threading
from dataclasses import dataclass
from queue import Queue
from typing import final

import numpy as np
import pytest

from evenstep import Decision
from evenstep.control import Job, Planner, Report
from evenstep.events import PolicyFailed, StepMeasured, WorkerLost
from evenstep.exceptions import WorkerLostError
from evenstep.policies import AbstractPolicy
from evenstep.torch._channel import StarChannel
from evenstep.torch._exchange import Exchange


@final
@dataclass(frozen=True)
class Shifting(AbstractPolicy[int]):
    """Moves one sample from rank 0 to rank 1 after every step."""

    name = "shifting"

    def init(self, cluster):
        return Decision(np.array([8, 8]), 0, "start")

    def update(self, cluster, timings, state):
        return Decision(np.array([7 - state, 9 + state]), state + 1, "shifted")


def reports_of(rank, step, size):
    """Return one rank's report of one step."""
    return [Report(step, size, 16, compute_s=0.1 * (rank + 1), data_s=0.0)]


@pytest.fixture
def star():
    """Two exchanges over a pair of sockets, with what rank 0 emitted."""
    opened = []

    def make(lag=0, **settings):
        one, other = socket.socketpair()
        watch = {"heartbeat_s": 0.05, "deadline_s": 5.0}
        emitted = Queue()
        both = [
            Exchange(rank, ["a", "b"], StarChannel({1 - rank: end}, **watch), lag=lag, emit=emit)
            for rank, end, emit in ((0, one, emitted.put), (1, other, None))
        ]
        for exchange in both:
            exchange.start()
        opened.extend(both)
        both[0].lead(Planner(Shifting(), Job(2, 16)))
        return both, emitted

    yield make
    for exchange in opened:
        exchange.close()


def play(both, num_steps):
    """Run both ranks through some steps; return the sizes that each was told, by step."""
    told = [[], []]

    def go(rank):
        for step in range(num_steps):
            plan = both[rank].at(step)
            told[rank].append(plan.batch_size)
            both[rank].report(step, reports_of(rank, step, plan.batch_size[rank]))
        told[rank].append(both[rank].at(num_steps).batch_size)

    threads = [threading.Thread(target=go, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return told


def test_step_k_decides_the_next_step(star):
    """Without lag; the first measured step warms up."""
    both, _ = star()

    mine, theirs = play(both, 4)

    assert mine == theirs
    assert mine == [(8, 8), (8, 8), (7, 9), (6, 10), (5, 11)]


def test_a_resumed_run_counts_on(star):
    """Its first step has a number of its own, and starts with the first plan."""
    both, _ = star()
    told = []
    for step in range(57, 60):
        for rank in (0, 1):
            plan = both[rank].at(step)
            both[rank].report(step, reports_of(rank, step, plan.batch_size[rank]))
        told.append(plan.batch_size)

    assert told == [(8, 8), (8, 8), (7, 9)]


def test_with_lag_step_k_decides_the_one_after_the_next(star):
    """As on a device that nobody waits for."""
    both, _ = star(lag=1)

    mine, theirs = play(both, 4)

    assert mine == theirs
    assert mine == [(8, 8), (8, 8), (8, 8), (7, 9), (6, 10)]


def test_every_plan_is_announced_once_and_in_order(star):
    """Listeners replay them; a missing one would part the ranks."""
    both, _ = star()
    heard = [[], []]
    for rank in (0, 1):
        both[rank].subscribe(lambda plan, rank=rank: heard[rank].append(plan.epoch))

    play(both, 5)

    assert heard[0] == [1, 2, 3, 4]
    assert [epoch for epoch in heard[1] if epoch] == [1, 2, 3, 4]


def test_every_step_becomes_an_event(star):
    """On rank 0, with both ranks' figures."""
    both, emitted = star()

    play(both, 3)
    both[0].close()  # what is still to be told is told
    steps = [event for event in list(emitted.queue) if isinstance(event, StepMeasured)]

    assert [event.step for event in steps] == [0, 1, 2]
    assert steps[0].compute_s == pytest.approx((0.1, 0.2))
    assert steps[2].plan_epoch == 1


def test_late_measurements_are_planned_by_all_at_once(star):
    """Two steps that become known together make two plans, and both are announced."""
    both, _ = star(lag=1)
    heard = []
    both[1].subscribe(lambda plan: heard.append(plan.epoch))
    for rank in (0, 1):
        both[rank].at(0)
        both[rank].report(0, [])
        both[rank].report(1, [])
    for rank in (0, 1):
        both[rank].report(2, [*reports_of(rank, 0, 8), *reports_of(rank, 1, 8)])
        both[rank].report(3, reports_of(rank, 2, 8))

    plan = both[1].at(5)

    assert plan.batch_size == (6, 10)
    assert [epoch for epoch in heard if epoch] == [1, 2]


def test_a_step_that_one_rank_did_not_measure_is_left_out(star):
    """The plan stays, and nobody waits."""
    both, _ = star()
    both[1].at(0)
    for step in range(3):
        both[0].report(step, reports_of(0, step, 8))
        both[1].report(step, [] if step == 1 else reports_of(1, step, 8))

    assert both[1].at(2).batch_size == (8, 8)
    assert both[1].at(3).batch_size == (7, 9)


def test_a_planner_that_raises_does_not_stop_training(star):
    """Its failure becomes an event, and the plan in force goes on."""
    both, emitted = star()
    broken = both[0]._planner

    def observe(reports, *, next_step):
        raise ZeroDivisionError("a bug of ours")

    broken.observe = observe
    mine, theirs = play(both, 2)
    both[0].close()

    assert mine == theirs == [(8, 8)] * 3
    assert any(isinstance(event, PolicyFailed) for event in list(emitted.queue))


def test_a_lost_worker_is_an_error_for_everybody_who_waits():
    """With its rank and host, and an event on rank 0."""
    one, other = socket.socketpair()
    emitted = Queue()
    channel = StarChannel({1: one}, heartbeat_s=0.05, deadline_s=5.0)
    exchange = Exchange(0, ["a", "b"], channel, emit=emitted.put)
    exchange.start()
    exchange.lead(Planner(Shifting(), Job(2, 16)))
    exchange.at(0)
    exchange.report(0, reports_of(0, 0, 8))
    other.close()

    with pytest.raises(WorkerLostError, match=r"Rank 1 on b was lost.*last checkpoint") as caught:
        exchange.at(1)
    exchange.close()

    assert caught.value.rank == 1
    assert isinstance(emitted.get(timeout=1), WorkerLost)


def alone(**settings):
    """Return rank 0's exchange of a pair, and the other end of its connection."""
    one, other = socket.socketpair()
    channel = StarChannel({1: one}, heartbeat_s=0.02, deadline_s=5.0)
    exchange = Exchange(0, ["a", "b"], channel, emit=lambda event: None, **settings)
    exchange.start()
    exchange.lead(Planner(Shifting(), Job(2, 16)))
    exchange.at(0)
    return exchange, other


def test_a_main_thread_stuck_in_a_collective_is_ended():
    """It would wait for half an hour, and nothing can interrupt it."""
    ended = Queue()
    exchange, other = alone(grace_s=0.1, abort=ended.put, is_stuck=lambda thread_id: True)

    exchange.enter_collective()
    other.close()

    assert "Rank 1 on b was lost" in ended.get(timeout=5)
    exchange.close()


def test_a_broken_collective_whose_error_is_handled_ends_nobody():
    """The handler may be saving a checkpoint: it runs outside of the backward."""
    ended, ticks = Queue(), Queue()
    exchange, other = alone(grace_s=0.0, abort=ended.put)
    tick = exchange.tick
    exchange.tick = lambda: (tick(), ticks.put(exchange._error))

    exchange.enter_collective()  # and never left: an error was raised in there
    other.close()
    while ticks.get(timeout=5) is None:
        pass
    ticks.get(timeout=5)

    assert ended.empty()
    assert exchange.verdict(within_s=1).rank == 1
    exchange.close()


def test_outside_of_a_collective_nobody_is_ended():
    """An evaluation or a checkpoint may finish; the next step raises the error."""
    ended, ticks = Queue(), Queue()
    exchange, other = alone(grace_s=0.0, abort=ended.put)
    tick = exchange.tick
    exchange.tick = lambda: (tick(), ticks.put(exchange._error))

    exchange.enter_collective()
    exchange.leave_collective()
    other.close()
    while ticks.get(timeout=5) is None:
        pass
    ticks.get(timeout=5)  # one more, with the loss known and the grace over

    assert ended.empty()
    with pytest.raises(WorkerLostError, match="Rank 1 on b"):
        exchange.check()
    exchange.close()


def test_everybody_learns_how_long_the_slowest_took(star):
    """So that a rank knows whether it is early, and may wait where a loss has a name."""
    both, _ = star()

    play(both, 2)

    assert both[0].slowest_s == both[1].slowest_s == pytest.approx(0.2)
