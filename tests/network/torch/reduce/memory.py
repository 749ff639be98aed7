"""A transport in memory: a thread per rank, messages by tag."""

from __future__ import annotations

import threading
from collections import deque

import torch

WIDE = {
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}
"""In what numbers sums have to be made."""


class Operation:
    """A send or a receive."""

    def __init__(self, network, kind, rank, peer, tag, buffer):
        self.network, self.kind, self.rank, self.peer = network, kind, rank, peer
        self.tag, self.buffer, self.done = tag, buffer, False

    def wait(self, limit_s):
        with self.network.changed:
            ready = self.network.changed.wait_for(
                lambda: self.done or self.network.broken, timeout=limit_s or 20
            )
            if not self.done:
                raise RuntimeError("broken off" if ready else "nobody at the other end")


class Network:
    """Where messages meet.

    Attributes:
        most_under_way: most bytes that one rank ever had under way, by rank.
    """

    def __init__(self):
        self.changed = threading.Condition()
        self.broken = False
        self.posted = {}

    def meet(self, one):
        """Match by tag."""
        with self.changed:
            other_kind = "receive" if one.kind == "send" else "send"
            waiting = self.posted.setdefault((other_kind, one.peer, one.rank, one.tag), deque())
            if not waiting:
                key = (one.kind, one.rank, one.peer, one.tag)
                self.posted.setdefault(key, deque()).append(one)
                return
            self._copy(one, waiting.popleft())
            self.changed.notify_all()

    def _copy(self, one, other):
        send, receive = (one, other) if one.kind == "send" else (other, one)
        assert send.buffer.shape == receive.buffer.shape
        receive.buffer.copy_(send.buffer)
        send.done = receive.done = True


class MemoryTransport:
    """One rank's end."""

    def __init__(self, network, rank, world_size):
        self.network, self.rank, self.world_size = network, rank, world_size

    def receive(self, buffer, source, tag):
        return self._issue("receive", source, tag, buffer)

    def send(self, buffer, target, tag):
        return self._issue("send", target, tag, buffer)

    def break_off(self):
        with self.network.changed:
            self.network.broken = True
            self.network.changed.notify_all()

    def _issue(self, kind, peer, tag, buffer):
        assert buffer.is_contiguous()
        operation = Operation(self.network, kind, self.rank, peer, tag, buffer)
        self.network.meet(operation)
        return operation.wait


def on_threads(world_size, function):
    """Run ``function(rank)`` on a thread for each rank; return the results, or raise the first."""
    results = [None] * world_size

    def go(rank):
        try:
            results[rank] = function(rank)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=go, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def gradients_of(rank, num_elements, dtype=torch.float32):
    """What a rank has to give: of very different sizes, so that the order of sums shows."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(num_elements, generator=generator, dtype=torch.float64)
    return (values * 10.0 ** torch.randint(-3, 4, (num_elements,), generator=generator)).to(dtype)
