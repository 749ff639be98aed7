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
from evenstep.control import Job, Planner, Report
from evenstep.policies import AbstractPolicy
from evenstep.torch._exchange._stuck import TORCH


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


@contextmanager
def pairs():
    """Makes two exchanges over a pair of sockets, with what rank 0 emitted."""
    opened = []

    def make(lag=0, claims=None, **settings):
        one, other = socket.socketpair()
        watch = {"heartbeat_s": 0.05, "deadline_s": 5.0}
        emitted = Queue()
        both = [
            Exchange(
                rank,
                ["a", "b"],
                StarChannel({1 - rank: end}, **watch),
                framework=TORCH,
                lag=lag,
                emit=emit,
                heartbeat_s=0.05,
                **settings,
            )
            for rank, end, emit in ((0, one, emitted.put), (1, other, None))
        ]
        for exchange in both:
            exchange.start()
        opened.extend(both)
        both[0].lead(Planner(Shifting(), Job(2, 16), claims=claims))
        return both, emitted

    yield make
    for exchange in opened:
        exchange.close()
