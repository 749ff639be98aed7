"""Stand-ins around a channel and a router, for their tests."""

from __future__ import annotations

import threading
from queue import Queue

from evenstep._exchange._channel import StarChannel
from evenstep._exchange._meeting import connect_star
from evenstep._exchange._router import Router
from evenstep._exchange._wire import Peer, Wire

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
