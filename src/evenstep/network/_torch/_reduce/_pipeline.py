"""The rounds of the exchange: the pull of one chunk goes along with the push of the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, final

import torch

from ._bucket_job import BucketJob, Flight, Receipt
from ._buffers import Buffers
from ._staging import Staging
from ._sums import accumulator, mean_in_order
from ._timeouts import Timeouts
from ._transport import AbstractTransport

_T = TypeVar("_T")

# A push may keep its server waiting for less time than a pull its workers, who wait for the same
# lost rank: the server knows which it is, and tells them.
_PUSH_PART = 0.85


@final
class Pipeline:
    """Pushes, sums and pulls chunks, at most three of them under way.

    In round k a rank asks for its range of chunk k from every worker and for chunk k - 1 from every
    server, pushes chunk k, sums its range of chunk k - 1 and sends the result; then it waits for
    chunk k - 2. So both directions of a link are busy, sums are made while the next chunk is on
    its way, and receives are posted before sends. What a rank waits for, others send without
    waiting for it: no ranks wait in a circle.

    On the issuing thread alone.

    Args:
        transport: carries the ranges.
        workers: ranks that have gradients, ascending. All others only sum.
        timeouts: waits, and knows how long.

    Attributes:
        sent_bytes, received_bytes: gradients and sums over this rank's links, headers apart.
    """

    def __init__(
        self,
        transport: AbstractTransport,
        *,
        workers: Sequence[int],
        timeouts: Timeouts,
    ) -> None:
        self._transport = transport
        self._rank = transport.rank
        self._workers = tuple(workers)
        self._timeouts = timeouts
        self.sent_bytes = self.received_bytes = 0
        self.buffers = Buffers()
        self._staging = Staging(self.buffers)
        self._pushed: Flight | None = None
        self._pulled: Flight | None = None
        self._num_chunks = 0

    @property
    def is_empty(self) -> bool:
        """Whether no chunk is under way."""
        return self._pushed is None and self._pulled is None

    def jobs(self) -> list[BucketJob]:
        """Return the buckets that have a chunk under way, oldest first."""
        return [flight.job for flight in (self._pulled, self._pushed) if flight is not None]

    def run(self, job: BucketJob) -> None:
        """Push all chunks of ``job``; the last ones stay under way.

        Raises:
            PeerFailed: a rank is gone.
        """
        chunks = job.split.chunks(job.num_elements, job.wire.itemsize)
        for index, edges in enumerate(chunks):
            self._round(Flight(job, self._num_chunks, edges, index == len(chunks) - 1))
            self._num_chunks += 1
        if not chunks:
            job.done(None)

    def go_on(self) -> None:
        """Make one round without another chunk.

        Raises:
            PeerFailed: a rank is gone.
        """
        self._round(None)

    def _round(self, new: Flight | None) -> None:
        before = self._pushed
        if new is not None:
            self._open(new)
            self._ask_for_pushes(new)
        if before is not None:
            self._ask_for_pulls(before)
        if new is not None:
            self._push(new)
        if before is not None:
            self._sum(before)
            self._answer(before)
        if self._pulled is not None:
            self._finish(self._pulled)
        self._pulled, self._pushed = before, new  # not before: who failed is found in them

    def _open(self, flight: Flight) -> None:
        gradients = flight.job.gradients
        if gradients is not None:
            chunk = gradients[flight.edges[0] : flight.edges[-1]]
            flight.memory = self._staging.open(chunk, flight.job.wire)

    def _ask_for_pushes(self, flight: Flight) -> None:
        num_elements = flight.num_elements(self._rank)
        if not num_elements:
            return
        for worker in self._workers:
            if worker == self._rank:
                flight.terms.append(flight.part(self._rank))
                continue
            term = self._borrow(flight, num_elements, flight.job.wire)
            flight.terms.append(term)
            flight.pushes.append(self._receive(flight, worker, term, pull=False))

    def _ask_for_pulls(self, flight: Flight) -> None:
        if flight.memory is None:
            return
        for server in self._servers(flight):
            part = flight.part(server)
            flight.pulls.append(self._receive(flight, server, part, pull=True))

    def _push(self, flight: Flight) -> None:
        if flight.memory is None:
            return
        for server in _turned(self._servers(flight), self._rank):
            self._send(flight, server, flight.part(server), pull=False)

    def _sum(self, flight: Flight) -> None:
        for check in flight.job.checks:
            check()
        flight.job.checks.clear()
        for receipt in _turned(flight.pushes, flight.number):
            self._await(receipt, pull=False)
        if not flight.terms:
            return
        wire = flight.job.wire
        # The first term that is no gradient of this rank's own, which may be overwritten.
        leads = len(flight.terms) > 1 and self._workers[0] == self._rank
        mine = scratch = flight.terms[1 if leads else 0]
        if accumulator(wire) != wire:
            scratch = self._borrow(flight, mine.numel(), accumulator(wire))
        flight.result = mine if flight.memory is None else flight.part(self._rank)
        mean_in_order(flight.terms, scratch=scratch, out=flight.result)

    def _answer(self, flight: Flight) -> None:
        if flight.result is None:
            return
        for worker in _turned([w for w in self._workers if w != self._rank], self._rank):
            self._send(flight, worker, flight.result, pull=True)

    def _finish(self, flight: Flight) -> None:
        for receipt in _turned(flight.pulls, flight.number):
            self._await(receipt, pull=True)
        for peer, pending in flight.sends:
            self._timeouts.wait(pending, peer)
        gradients = flight.job.gradients
        if gradients is not None:
            assert flight.memory is not None
            chunk = gradients[flight.edges[0] : flight.edges[-1]]
            self._staging.close(flight.memory, chunk)
        for buffer in flight.borrowed:
            self.buffers.give(buffer)
        if flight.is_last:
            for peer, pending in flight.job.sends:
                self._timeouts.wait(pending, peer)
            flight.job.done(None)

    def _servers(self, flight: Flight) -> list[int]:
        """Return who sums some of the chunk, but this rank."""
        ranks = range(self._transport.world_size)
        return [rank for rank in ranks if rank != self._rank and flight.num_elements(rank)]

    def _borrow(self, flight: Flight, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        buffer = self.buffers.take(num_elements, dtype, torch.device("cpu"))
        flight.borrowed.append(buffer)
        return buffer[:num_elements]

    def _receive(self, flight: Flight, peer: int, part: torch.Tensor, *, pull: bool) -> Receipt:
        pending = self._transport.receive(part, peer, chunk_tag(flight, pull=pull))
        return Receipt(peer, pending, part.nbytes)

    def _send(self, flight: Flight, peer: int, part: torch.Tensor, *, pull: bool) -> None:
        pending = self._transport.send(part, peer, chunk_tag(flight, pull=pull))
        flight.sends.append((peer, pending))
        self.sent_bytes += part.nbytes

    def _await(self, receipt: Receipt, *, pull: bool) -> None:
        self._timeouts.wait(receipt.pending, receipt.peer, part=1.0 if pull else _PUSH_PART)
        self.received_bytes += receipt.num_bytes


def chunk_tag(flight: Flight, *, pull: bool) -> int:
    """Return the tag of a chunk's push or pull: another one under another plan.

    A rank that sums by an older plan then meets no other, where ranges of other lengths would break
    its process.
    """
    return (((flight.number % (1 << 21)) * 2 + pull) << 7) + 64 + flight.job.split.epoch % 64


def is_pull(tag: int) -> bool:
    """Return whether a tag of ``chunk_tag`` is that of a pull."""
    return bool((tag >> 7) & 1)


def _turned(items: Sequence[_T], by: int) -> list[_T]:
    """Return the items from another first one on: not all begin with rank 0."""
    by = by % len(items) if items else 0
    return [*items[by:], *items[:by]]
