"""Two ranks' exchanges in one process, for their tests."""

from __future__ import annotations

import socket
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Queue
from typing import final

import numpy as np

from evenstep import Decision
from evenstep._exchange._channel import StarChannel
from evenstep._exchange._exchange import Exchange
from evenstep._exchange._message_kinds import ENDED, StepReports, ThreadLocation
from evenstep._exchange._threads import Framework, frame_of, line_of_user
from evenstep._planner import Job, Planner, Report
from evenstep.policies import AbstractPolicy

from .channels import channel_over, meet


def place_of(thread_id):
    """Where a thread is, for a framework without collectives or a compiler."""
    frame = frame_of(thread_id)
    if frame is None:
        return ENDED
    return ThreadLocation(line_of_user(frame), in_collective=False, compiling=False)


PLAIN = Framework(place_of, lambda thread_id: False, "whoever runs the tests does")


@final
@dataclass(frozen=True)
class Shifting(AbstractPolicy[int]):
    """Moves one sample from rank 0 to rank 1 after every reading, which is a step by default."""

    name = "shifting"
    reading_s: float = 0.0

    def init(self, cluster):
        return Decision(np.array([8, 8]), 0, "start")

    def update(self, cluster, timings, state):
        return Decision(np.array([7 - state, 9 + state]), state + 1, "shifted")


def reports_of(rank, step, size):
    """Return one rank's report of one step."""
    return [Report(step, size, 16, compute_s=0.1 * (rank + 1), data_s=0.0)]


def gathering():
    """Return a planner whose policy is shown 50 ms of short steps together."""
    return Planner(Shifting(reading_s=0.05), Job(2, 16))


def short(rank, step, size):
    """Return a report of a step of 5 ms: such steps are decided on together."""
    return [Report(step, size, 16, 0.005, 0.0, wall_s=0.006)]


def report(exchange, step, reports):
    """Report a step, with what was measured by then."""
    messages = (StepReports(step, tuple(reports)),)
    exchange.report(step, lambda: messages)


@contextmanager
def pairs():
    """Makes two exchanges over a pair of sockets, with what rank 0 emitted."""
    opened = []

    def make(lag=0, claims=None, planner=None, heartbeat_s=0.05, deadline_s=None, **settings):
        one, other = socket.socketpair()
        watch = {"heartbeat_s": heartbeat_s, "deadline_s": deadline_s or 100 * heartbeat_s}
        emitted = Queue()
        both = [
            Exchange(
                rank,
                ["a", "b"],
                channel_over({1 - rank: end}, **watch),
                framework=PLAIN,
                lag=lag,
                emit=emit,
                heartbeat_s=heartbeat_s,
                **settings,
            )
            for rank, end, emit in ((0, one, emitted.put), (1, other, None))
        ]
        for exchange in both:
            exchange.start()
        opened.extend(both)
        both[0].lead(planner or Planner(Shifting(), Job(2, 16), claims=claims))
        return both, emitted

    yield make
    for exchange in opened:
        exchange.close()


@contextmanager
def linked(framework, planner, **settings):
    """Two exchanges over real connections, with what each emitted, and the connections."""
    stars, emitted = meet(), ([], [])
    exchanges = [
        Exchange(
            rank,
            ("first", "second"),
            StarChannel(stars[rank], heartbeat_s=0.05, deadline_s=5),
            framework=framework,
            emit=emitted[rank].append,
            grace_s=1000,
            **settings,
        )
        for rank in (0, 1)
    ]
    for exchange in exchanges:
        exchange.start()
    exchanges[0].lead(planner)
    yield exchanges, emitted, stars
    for exchange in exchanges:
        exchange.close()


def alone(*, starts=True, **settings):
    """Return rank 0's exchange of a pair, and the other end of its connection."""
    one, other = socket.socketpair()
    channel = channel_over({1: one}, heartbeat_s=0.02, deadline_s=5.0)
    settings = {"framework": PLAIN, "emit": lambda event: None, **settings}
    exchange = Exchange(0, ["a", "b"], channel, **settings)
    if starts:
        exchange.start()
    exchange.lead(Planner(Shifting(), Job(2, 16)))
    exchange.at(0)
    return exchange, other
