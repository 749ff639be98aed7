"""Mailboxes that talk to each other over real connections, in one process."""

from __future__ import annotations

import socket

from evenstep._exchange._mailbox import Mailbox

from .channels import FAST, channel_over, router


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
