"""Transports in memory: a thread per rank, messages by tag or in batches, as over NCCL."""

from __future__ import annotations

import threading
from collections import defaultdict, deque

import torch

from evenstep.torch._reduce._transport import AbstractTransport

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

    def wait(self, limit_s=None):
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
        self.batches = defaultdict(deque)
        self.shapes = defaultdict(list)  # operations of each batch, by rank

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

    def launch(self, rank, batch):
        """Match by order: nothing of a batch goes out before the batch ahead of it is done."""
        with self.changed:
            self.batches[rank].append(batch)
            self.shapes[rank].append(sorted((o.kind, o.peer, o.buffer.numel()) for o in batch))
            self.changed.notify_all()
            while self._progress():
                self.changed.notify_all()

    def _progress(self):
        for rank in list(self.batches):
            while self.batches[rank] and all(one.done for one in self.batches[rank][0]):
                self.batches[rank].popleft()
        heads = [queue[0] for queue in self.batches.values() if queue]
        waiting = [one for head in heads for one in head if not one.done]
        receives = [one for one in waiting if one.kind == "receive"]
        for one in [one for one in waiting if one.kind == "send"]:
            for other in receives:
                if (other.rank, other.peer) == (one.peer, one.rank):
                    self._copy(one, other)
                    return True
        return False

    def _copy(self, one, other):
        send, receive = (one, other) if one.kind == "send" else (other, one)
        assert send.buffer.shape == receive.buffer.shape
        receive.buffer.copy_(send.buffer)
        send.done = receive.done = True


class MemoryTransport(AbstractTransport):
    """One rank's end, matched by tag."""

    in_order = False
    on_host = True

    def __init__(self, network, rank, world_size):
        self.network, self.rank, self.world_size = network, rank, world_size
        self.ranks = tuple(range(10, 10 + world_size))

    def receive(self, buffer, source, tag):
        return self._issue("receive", source, tag, buffer)

    def send(self, buffer, target, tag):
        return self._issue("send", target, tag, buffer)

    def launch(self):
        pass

    def break_off(self):
        with self.network.changed:
            self.network.broken = True
            self.network.changed.notify_all()

    def _issue(self, kind, peer, tag, buffer):
        assert buffer.is_contiguous()
        operation = Operation(self.network, kind, self.rank, peer, tag, buffer)
        self.network.meet(operation)
        return operation


class OrderedTransport(MemoryTransport):
    """One rank's end, matched by order within batches; tags are for others."""

    in_order = True
    on_host = False

    def __init__(self, network, rank, world_size):
        super().__init__(network, rank, world_size)
        self.batch = []

    def launch(self):
        batch, self.batch = self.batch, []
        if batch:
            self.network.launch(self.rank, batch)

    def _issue(self, kind, peer, tag, buffer):
        operation = Operation(self.network, kind, self.rank, peer, tag, buffer)
        self.batch.append(operation)
        return operation


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
