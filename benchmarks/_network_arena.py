"""One rank of the network's benchmark: exchanges that are timed, checked and counted."""

from __future__ import annotations

import abc
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from evenstep.network import Split, traffic_bytes
from evenstep.network._following._link_tracker import ObservedExchange, Transfers
from evenstep.network._torch._reducer import ShardedReducer
from evenstep.network._torch._transport import GlooTransport
from evenstep.network._torch._watched import WatchedTransport, ways_to


@dataclass(frozen=True, slots=True)
class Taken:
    """One exchange, as rank 0 knows it.

    Attributes:
        seconds: from when all workers had gradients until the last had all sums.
        step_s: the same with what the gradients took, and what was made of the sums.
        sent_bytes: what every host's interface sent, headers and all.
        planned_bytes: what the plan says of it, headers apart; None for all-reduce.
        rows: what went over every way between two ranks, and from a rank to itself all that came
            to it, and for how long.
        exact: whether all ranks hold what a sum in rank order gives, bit for bit.
        apart: largest difference from that, any rank.
    """

    seconds: float
    step_s: float
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


class Work(abc.ABC):
    """Where a worker's gradients come from, and where their mean goes."""

    @abc.abstractmethod
    def compute(self, gradient: Tensor) -> None:
        """Write the next gradient."""

    @abc.abstractmethod
    def update(self, mean: Tensor) -> None:
        """Take what all workers' are on average."""

    @abc.abstractmethod
    def mean(self) -> Tensor | None:
        """Return what that had to be, as a sum in rank order; None where it is not checked."""


@final
class Given(Work):
    """The same gradients always.

    Args:
        mine: of this worker.
        mean: of all.
    """

    def __init__(self, mine: Tensor, mean: Tensor) -> None:
        self._mine, self._mean = mine, mean

    def compute(self, gradient: Tensor) -> None:
        gradient.copy_(self._mine)

    def update(self, mean: Tensor) -> None:
        pass

    def mean(self) -> Tensor:
        return self._mean


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
        """Take gradients of another size."""
        self.num_elements = num_elements
        terms = [_gradients(worker, num_elements) for worker in self.workers]
        mine = terms[self.rank] if self.is_worker else torch.empty(num_elements)
        self._given = Given(mine, mean_of(terms))
        self._field = torch.empty(num_elements)

    def exchange(
        self, parts: Sequence[int] | None, num_chunks: int = 1, work: Work | None = None
    ) -> Taken | None:
        """Average the gradients on all ranks, and return on rank 0 how that went.

        Args:
            parts: of 2**20 that each rank sums; None is gloo's all-reduce among the workers.
            num_chunks: in how many chunks.
            work: what the gradients come from, and what is made of their mean, both timed; the
                same gradients always where it is missing.
        """
        work = self._given if work is None else work
        split = None
        if parts is not None:
            self._epoch += 1
            chunk_bytes = 4 * -(-len(self._field) // num_chunks)
            split = Split(tuple(parts), self._epoch, chunk_bytes, min_bytes=1024)
        if self.is_worker:
            self.reducer.adopt(split)
        self.transport.take_arrivals()
        dist.barrier()
        sent_before, begin_s = sent_bytes(), monotonic()
        if self.is_worker:
            work.compute(self._field)
        ready_s = monotonic()
        if self.is_worker:
            self._average(split)
        there_s = monotonic()
        if self.is_worker:
            work.update(self._field)
        end_s = monotonic()
        dist.barrier()  # what the interfaces had in their queues is sent
        sent = sent_bytes() - sent_before
        rows = ways_to(self.rank, self.transport.take_arrivals())
        told = gathered(((begin_s, ready_s, there_s, end_s), sent, rows, *self._checked(work)))
        if told is None:
            return None
        times, each_sent, each_rows, exacts, aparts = zip(*told, strict=True)
        begins, readies, theres, ends = zip(
            *(times[worker] for worker in self.workers), strict=True
        )
        planned = None
        if split is not None:
            planned = list(traffic_bytes(split, len(self._field), 4, workers=self.workers)[0])
        all_rows = [tuple(row) for rows in each_rows for row in rows]
        return Taken(
            seconds=max(theres) - max(readies),
            step_s=max(ends) - max(begins),
            sent_bytes=list(each_sent),
            planned_bytes=planned,
            rows=all_rows,
            exact=all(exacts),
            apart=max(aparts),
        )

    def _average(self, split: Split | None) -> None:
        """Do this worker's part; those that serve do theirs by themselves."""
        if split is None:
            dist.all_reduce(self._field, group=self.group)
            self._field /= len(self.workers)
        else:
            self.reducer.reduce(self._field).wait()

    def _checked(self, work: Work) -> tuple[bool, float]:
        """Return whether the result is the sum in rank order, and how far it is apart."""
        if not self.is_worker:
            return True, 0.0
        self.reducer.settle()
        if (mean := work.mean()) is None:
            return True, 0.0
        return torch.equal(self._field, mean), float((self._field - mean).abs().max())

    def is_alike(self, digest: str) -> bool:
        """Return on rank 0 whether all workers tell the same of what they have."""
        told = gathered(digest)
        return told is None or len({told[worker] for worker in self.workers}) == 1

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


def mean_of(terms: Sequence[Tensor]) -> Tensor:
    """Return the mean, summed in the order of the terms."""
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total / len(terms)


def _gradients(worker: int, num_elements: int) -> torch.Tensor:
    return torch.randn(num_elements, generator=torch.Generator().manual_seed(worker))
