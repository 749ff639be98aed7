"""Two ranks' exchanges, channels and mailboxes in one process, for their tests."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Queue
from typing import final

import numpy as np

from evenstep import Decision
from evenstep._exchange._channel import Peer, StarChannel, Wire
from evenstep._exchange._exchange import Exchange
from evenstep._exchange._mailbox import Mailbox
from evenstep._exchange._meeting import connect_star
from evenstep._exchange._message_kinds import ENDED, StepReports, ThreadLocation
from evenstep._exchange._router import Router
from evenstep._exchange._threads import Framework, frame_of, line_of_user
from evenstep._planner import Job, Planner, Report
from evenstep.policies import AbstractPolicy


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


FAST = {"heartbeat_s": 0.05, "deadline_s": 0.4}


class Listener:
    """Puts everything that it is told into queues."""

    def __init__(self):
        self.messages = Queue()
        self.losses = Queue()

    def received(self, peer, message):
        self.messages.put((peer, message))
        if message == b"please raise":
            raise KeyError("a receiver's own mistake")

    def lost(self, peer, problem):
        self.losses.put((peer, problem))

    def tick(self):
        """Nothing is due."""


def peers_over(connections):
    """Return a peer over each open socket, by the other end's rank; they share an empty key."""
    return {
        number: Peer(connection, Wire(b"", is_caller=number == 0))
        for number, connection in connections.items()
    }


def channel_over(connections, **settings):
    """Return a channel over open sockets, by the other end's rank."""
    return StarChannel(peers_over(connections), **settings)


def rendezvous(world_size):
    """Return a ``share`` for threads: rank 0's value for everybody."""
    box, there = [], threading.Event()

    def share(value):
        if value is not None:
            box.append(value)
            there.set()
        assert there.wait(10)
        return box[0]

    return share


def meet(world_size=2, *, share=None, **settings):
    """Return the connections of all ranks, by rank: real ones."""
    share, stars = share or rendezvous(world_size), {}
    settings = {"addresses": ["127.0.0.1"]} | settings

    def join(rank):
        stars[rank] = connect_star(rank, world_size, share, **settings)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return stars


class AllThere:
    """An owner that has lost no worker, and will lose none."""

    is_broken = False

    def check(self): ...

    def check_left(self): ...

    def lose(self, rank, problem):
        raise AssertionError(f"rank {rank}: {problem}")


def close_all(stars):
    """Close the connections of all ranks."""
    for peers in stars.values():
        for peer in peers.values():
            peer.close()


def router(rank=0, world_size=1, channel=None, owner=None):
    """Return a router over a channel, which reads what comes there if it is started with it."""
    made = Router(rank, world_size, channel)
    made.owner = owner or AllThere()
    return made


class Reading:
    """What starts a channel for a router's sake alone."""

    def __init__(self, router):
        self.received = router.received

    def lost(self, peer, problem): ...

    def tick(self): ...


class End:
    """One rank's mailbox, its channel, and what it knows of losses."""

    def __init__(self, rank, connections, world_size):
        self.error = None
        self.channel = channel_over(connections, **FAST)
        self.router = router(rank, world_size, self.channel, owner=self)
        self.box = Mailbox(self.router)
        self.router.add(self.box)

    @property
    def is_broken(self):
        return self.error is not None

    def check(self):
        if self.error is not None:
            raise self.error

    def check_left(self):
        """Nobody leaves on purpose."""

    def received(self, peer, message):
        self.router.received(peer, message)

    def lost(self, peer, problem):
        self.error = ConnectionError(f"rank {peer}: {problem}")
        self.router.notify()

    def tick(self):
        """Nothing is due."""


def star(world_size):
    """Return the ends of all ranks, listening."""
    pairs = [socket.socketpair() for _ in range(world_size - 1)]
    hub = {rank: pair[0] for rank, pair in enumerate(pairs, start=1)}
    others = [End(rank, {0: pair[1]}, world_size) for rank, pair in enumerate(pairs, start=1)]
    ends = [End(0, hub, world_size), *others]
    for end in ends:
        end.channel.start(end)
    return ends
