"""One rank of the network's benchmark: exchanges that are timed, checked and counted."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, final

import torch
import torch.distributed as dist

from evenstep.network import Split, traffic_bytes
from evenstep.network._following._transfers import ObservedExchange, Transfers
from evenstep.network._torch._reduce._gloo import GlooTransport
from evenstep.network._torch._reduce._observed import ways_to
from evenstep.network._torch._reduce._reducer import ShardedReducer
from evenstep.network._torch._reduce._watched import WatchedTransport


@dataclass(frozen=True, slots=True)
class Taken:
    """One exchange, as rank 0 knows it.

    Attributes:
        seconds: from when all ranks could begin until the last had all sums.
        sent_bytes: what every host's interface sent, headers and all.
        planned_bytes: what the plan says of it, headers apart; None for all-reduce.
        rows: what went over every way between two ranks, and from a rank to itself all that came
            to it, and for how long.
        exact: whether all ranks hold what a sum in rank order gives, bit for bit.
        apart: largest difference from that, any rank.
    """

    seconds: float
    sent_bytes: list[int]
    planned_bytes: list[int] | None
    rows: list[tuple[int, int, float, float]]
    exact: bool
    apart: float

    def exchange(self, plan_epoch: int) -> ObservedExchange:
        """Return it as the planner takes it."""
        transfers = None
        if self.planned_bytes is not None:
            transfers = Transfers.from_rows(len(self.sent_bytes), self.rows).lasting(self.seconds)
        return ObservedExchange(plan_epoch, self.seconds, transfers)


@final
class Arena:
    """One rank's groups, gradients and reducer.

    Args:
        num_workers: ranks from 0 that have gradients; the others only serve.
        num_elements: of the gradients, in float32.
    """

    def __init__(self, num_workers: int, num_elements: int) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.workers = range(num_workers)
        self.group = dist.new_group(list(self.workers))
        plain = GlooTransport(dist.new_group(list(range(self.world_size))))
        self.transport = transport = WatchedTransport(plain)
        self.reducer = ShardedReducer(transport, workers=self.workers, timeout_s=120.0)
        self.reducer.start()
        self._epoch = 0
        self._server: threading.Thread | None = None
        if not self.is_worker:
            self._server = threading.Thread(target=self.reducer.serve)
            self._server.start()
        self.resize(num_elements)

    @property
    def is_worker(self) -> bool:
        """Whether this rank has gradients."""
        return self.rank in self.workers

    def resize(self, num_elements: int) -> None:
        """Take gradients of another size, and what their mean has to be."""
        terms = [_gradients(worker, num_elements) for worker in self.workers]
        mean = terms[0].clone()
        for term in terms[1:]:
            mean += term
        self.mean = mean / len(self.workers)
        self.mine = terms[self.rank] if self.is_worker else torch.empty(num_elements)
        self._field = torch.empty(num_elements)

    def exchange(self, parts: Sequence[int] | None, num_chunks: int = 1) -> Taken | None:
        """Average the gradients on all ranks, and return on rank 0 how that went.

        Args:
            parts: of 2**20 that each rank sums; None is gloo's all-reduce among the workers.
            num_chunks: in how many chunks.
        """
        split = None
        if parts is not None:
            self._epoch += 1
            chunk_bytes = 4 * -(-len(self.mean) // num_chunks)
            split = Split(tuple(parts), self._epoch, chunk_bytes, min_bytes=1024)
        if self.is_worker:
            self.reducer.adopt(split)
        self._field.copy_(self.mine)
        self.transport.take_arrivals()
        dist.barrier()
        sent_before, begin_s = sent_bytes(), monotonic()
        self._average(split)
        end_s = monotonic()
        dist.barrier()  # what the interfaces had in their queues is sent
        sent = sent_bytes() - sent_before
        rows = ways_to(self.rank, self.transport.take_arrivals())
        told = gathered((begin_s, end_s, sent, rows, *self._checked(split)))
        if told is None:
            return None
        begins, ends, each_sent, each_rows, exacts, aparts = zip(*told, strict=True)
        planned = None
        if split is not None:
            planned = list(traffic_bytes(split, len(self.mean), 4, workers=self.workers)[0])
        all_rows = [tuple(row) for rows in each_rows for row in rows]
        seconds = max(ends[worker] for worker in self.workers) - max(begins)
        return Taken(seconds, list(each_sent), planned, all_rows, all(exacts), max(aparts))

    def _average(self, split: Split | None) -> None:
        """Do this rank's part; those that serve do theirs by themselves."""
        if not self.is_worker:
            return
        if split is None:
            dist.all_reduce(self._field, group=self.group)
        else:
            self.reducer.reduce(self._field).wait()

    def _checked(self, split: Split | None) -> tuple[bool, float]:
        """Return whether the result is the sum in rank order, and how far it is apart."""
        if not self.is_worker:
            return True, 0.0
        self.reducer.settle()
        if split is None:
            self._field /= len(self.workers)
        apart = float((self._field - self.mean).abs().max())
        return torch.equal(self._field, self.mean), apart

    def close(self) -> None:
        """End the exchange on all ranks."""
        dist.barrier()
        if self.is_worker:
            self.reducer.close()
        if self._server is not None:
            self._server.join()
        self.transport.close()
        dist.barrier()


def sent_bytes() -> int:
    """Return what this host's interface has sent so far, headers and all."""
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "eth0":
            return int(figures.split()[8])
    raise LookupError("no interface named eth0: run this in a lab")


def shared(mine: Any) -> Any:
    """Return on all ranks what rank 0 has."""
    told = [mine]
    dist.broadcast_object_list(told)
    return told[0]


def gathered(mine: Any) -> list[Any] | None:
    """Return on rank 0 what all ranks have."""
    told: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, told)
    return told


def _gradients(worker: int, num_elements: int) -> torch.Tensor:
    return torch.randn(num_elements, generator=torch.Generator().manual_seed(worker))
