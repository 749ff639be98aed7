"""The rounds of the exchange, on a thread: a chunk's pull goes along with the push of the next.

Each chunk of a bucket lies in the bucket or in a copy for the wire, and is summed in rank order, to
the same bits on whichever rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TypeVar, final

import torch

from .._plans._share_plan import Split
from ._transport import AbstractTransport, Pending, Timeouts


@dataclass(slots=True, eq=False)
class BucketJob:
    """One bucket on one rank.

    Attributes:
        gradients: flat and contiguous, overwritten by their mean; None on a rank without data.
        num_elements: how many they are on every rank.
        wire: the numbers in which they travel.
        split: who sums what.
        done: called on the issuing thread with None, or with the error that ended it.
        step: the step that it belongs to.
        ready: when the device has written the gradients; None where there is none.
        sends: notes to others that leave with it, by peer.
    """

    gradients: torch.Tensor | None
    num_elements: int
    wire: torch.dtype
    split: Split
    done: Callable[[BaseException | None], None]
    step: int = 0
    ready: torch.cuda.Event | None = None
    sends: list[tuple[int, Pending]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Flight:
    """One chunk under way.

    Attributes:
        job: its bucket.
        number: of the chunk, counted over all buckets, the same on all ranks.
        edges: rank r sums elements ``edges[r]`` to ``edges[r + 1]`` of the bucket.
        memory: where it lies meanwhile, from ``edges[0]`` on; None on a rank without data.
        terms: the workers' gradients of this rank's own range, in their order.
        result: their mean, once they are summed.
        borrowed: buffers to be given back.
        pushes, pulls: what is on its way here, by peer.
        sends: what is on its way from here, likewise.
    """

    job: BucketJob
    number: int
    edges: tuple[int, ...]
    memory: torch.Tensor | None = None
    terms: list[torch.Tensor] = field(default_factory=list)
    result: torch.Tensor | None = None
    borrowed: list[torch.Tensor] = field(default_factory=list)
    pushes: list[tuple[int, Pending]] = field(default_factory=list)
    pulls: list[tuple[int, Pending]] = field(default_factory=list)
    sends: list[tuple[int, Pending]] = field(default_factory=list)

    def num_elements(self, server: int) -> int:
        """Return how many elements of the chunk ``server`` sums."""
        return self.edges[server + 1] - self.edges[server]

    def part(self, server: int) -> torch.Tensor:
        """Return what ``server`` sums, where the chunk lies."""
        assert self.memory is not None
        start = self.edges[0]
        return self.memory[self.edges[server] - start : self.edges[server + 1] - start]


FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_HALVES = (torch.bfloat16, torch.float16)


def travels_in(dtype: torch.dtype, wire: torch.dtype | None) -> torch.dtype:
    r"""Return in what numbers gradients of ``dtype`` travel, if ``wire`` is asked for.

    With ``None`` they travel as they are; 16 bits are never made of 16 others. In 16 bits, each
    worker rounds what it pushes, also where it sums itself, servers sum in float32, and what they
    hand back is rounded once more and the same on all ranks bit for bit. With $u$ the unit
    roundoff, $2^{-8}$ for bfloat16 and $2^{-11}$ for float16, and $N$ workers, each element of the
    result is within

    $$(2 u + u^2 + N 2^{-23}) \frac{1}{N} \sum_i |g_i|$$

    of the mean, plus, for float16, $2^{-24}$ where numbers are subnormal. Above 65504 a float16 is
    infinite: scale the loss, as for any float16 gradient. Right where links are the limit and
    gradients are noisy anyway; wrong where a step has to be reproduced.

    Raises:
        TypeError: these are no gradients that can be summed.
    """
    if dtype not in FLOATS:
        raise TypeError(
            f"Gradients of {dtype} cannot be summed by shares: they have to be of float32, "
            f"float64, bfloat16 or float16. Use plain all-reduce for this model."
        )
    return dtype if wire is None or dtype in _HALVES else wire


def accumulator(wire: torch.dtype) -> torch.dtype:
    """Return in what numbers of ``wire`` are summed: float32 for 16 bits, else as they are."""
    return torch.float32 if wire in _HALVES else wire


def mean_in_order(
    terms: Sequence[torch.Tensor], *, scratch: torch.Tensor, out: torch.Tensor
) -> None:
    """Write the mean of ``terms`` to ``out``: summed one after the other, then divided.

    Element by element, so that a part of the mean is the mean of the parts, bit for bit. The
    payload of a NaN alone may differ.

    Args:
        terms: at least one, of one shape.
        scratch: of the accumulator's type and that shape; it may be one of the first two terms.
        out: of the terms' type; it may be any of the terms, or the scratch.
    """
    if len(terms) == 1:
        out.copy_(terms[0])
        return
    if scratch.dtype == terms[0].dtype:
        torch.add(terms[0], terms[1], out=scratch)  # which may be the memory of either
        rest = terms[2:]
    else:
        scratch.copy_(terms[0])
        rest = terms[1:]
    for term in rest:
        scratch.add_(term)
    if out.dtype == scratch.dtype:
        torch.div(scratch, len(terms), out=out)
    else:
        out.copy_(scratch.div_(len(terms)))


Key = tuple[torch.dtype, torch.device, bool]


@final
class Buffers:
    """Flat buffers that are given back: as many of a kind as were ever out at once.

    Each grows to the largest that was asked of it. On the issuing thread alone.

    A chunk gets memory that the transport can send and receive in, in the wire's numbers. Gradients
    that can go as they are stay where they are: what is pulled overwrites what has been pushed,
    which all servers have by then. Others go through a copy: in other numbers, or, from a device,
    in pinned memory. Copies run on a stream of their own; this thread waits for that copy's event
    alone, and no device is ever synchronised.
    """

    def __init__(self) -> None:
        self._free: dict[Key, list[torch.Tensor]] = {}
        self.num_bytes = 0

    def take(
        self, num_elements: int, dtype: torch.dtype, device: torch.device, *, pinned: bool = False
    ) -> torch.Tensor:
        """Return a buffer of so many elements, with anything in it."""
        free = self._free.setdefault((dtype, device, pinned), [])
        buffer = free.pop() if free else None
        if buffer is not None and buffer.numel() < num_elements:
            self.num_bytes -= buffer.nbytes
            buffer = None
        if buffer is None:
            buffer = torch.empty(num_elements, dtype=dtype, device=device, pin_memory=pinned)
            self.num_bytes += buffer.nbytes
        return buffer

    def give(self, buffer: torch.Tensor, *, pinned: bool = False) -> None:
        """Take back what ``take`` returned, whole."""
        self._free[buffer.dtype, buffer.device, pinned].append(buffer)

    def open(self, gradients: torch.Tensor, wire: torch.dtype) -> torch.Tensor:
        """Return memory with ``gradients`` in it, in numbers of ``wire``, to give to ``close``.

        As large as they are, or larger.
        """
        leaves = gradients.is_cuda
        if gradients.dtype == wire and not leaves:
            return gradients
        device = torch.device("cpu") if leaves else gradients.device
        field = self.take(gradients.numel(), wire, device, pinned=leaves)
        field[: gradients.numel()].copy_(gradients, non_blocking=leaves)
        if leaves:
            _wait_for_copy(gradients.device)
        return field

    def close(self, field: torch.Tensor, gradients: torch.Tensor) -> None:
        """Have what was pulled into ``field`` take the place of ``gradients``."""
        if field.data_ptr() == gradients.data_ptr():
            return
        leaves = gradients.is_cuda
        gradients.copy_(field[: gradients.numel()], non_blocking=leaves)
        if leaves:
            _wait_for_copy(gradients.device)  # the next chunk's copy may take this memory
        self.give(field, pinned=leaves)


def _wait_for_copy(device: torch.device) -> None:
    """Wait on this thread for what its stream was given, and for nothing else of the device."""
    # Sleeps instead of spinning.
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    event.synchronize()


_T = TypeVar("_T")

# A push may keep its server waiting for less time than a pull its workers, who wait for the same
# lost rank: the server knows which it is, and notifies them.
_PUSH_PART = 0.85


@final
class Pipeline:
    """Takes buckets, and pushes, sums and pulls their chunks, at most three of them under way.

    In round k a rank asks for its range of chunk k from every worker and for chunk k - 1 from every
    server, pushes chunk k, sums its range of chunk k - 1 and sends the result; then it waits for
    chunk k - 2. So both directions of a link are busy, sums are made while the next chunk is on
    its way, and receives are posted before sends. What a rank waits for, others send without
    waiting for it: no ranks wait in a circle.

    All of it happens on one issuing thread, which ends at the first error. Every bucket gets that.

    Args:
        transport: carries the ranges.
        workers: ranks that have gradients, ascending. All others only sum.
        timeouts: waits, and knows how long.
        prepare: called with each bucket before its first chunk.
        on_error: turns an error into the one to raise, and makes the others' waits end too.

    Attributes:
        sent_bytes, received_bytes: gradients and sums over this rank's links, headers apart.
    """

    def __init__(
        self,
        transport: AbstractTransport,
        *,
        workers: Sequence[int],
        timeouts: Timeouts,
        prepare: Callable[[BucketJob], None],
        on_error: Callable[[BaseException], BaseException],
    ) -> None:
        self._transport = transport
        self._rank = transport.rank
        self._workers = tuple(workers)
        self._timeouts = timeouts
        self._prepare, self._on_error = prepare, on_error
        self.sent_bytes = self.received_bytes = 0
        self.buffers = Buffers()
        self._pushed: Flight | None = None
        self._pulled: Flight | None = None
        self._num_chunks = 0
        self._queue: SimpleQueue[BucketJob | None] = SimpleQueue()
        self._lock = threading.Lock()  # between a bucket that comes and an error that ends all
        self._job: BucketJob | None = None
        self._error: BaseException | None = None
        self._stream: torch.cuda.Stream | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="evenstep-reduce", daemon=True)
        self._thread.start()

    def put(self, job: BucketJob) -> None:
        """Have all chunks of ``job`` exchanged.

        Raises:
            BaseException: what ended an earlier one.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            self._queue.put(job)

    def close(self) -> None:
        """End the thread once all that was put is done or failed. May be called again."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        try:
            while (job := self._next()) is not None:
                self._job = job
                self._wait_for_device(job)
                self._prepare(job)
                for edges in job.split.chunks(job.num_elements, job.wire.itemsize):
                    self._round(Flight(job, self._num_chunks, edges))
                    self._num_chunks += 1
                if not job.num_elements:
                    job.done(None)
                self._job = None
            while self._under_way():
                self._round(None)
        except BaseException as error:  # to be raised by what waits for a bucket
            self._fail(self._on_error(error))

    def _under_way(self) -> list[Flight]:
        """Return the chunks that are, oldest first."""
        return [flight for flight in (self._pulled, self._pushed) if flight is not None]

    def _next(self) -> BucketJob | None:
        """Return the next bucket; meanwhile, finish the chunks of those before."""
        while True:
            try:
                return self._queue.get(block=not self._under_way())
            except Empty:
                self._round(None)

    def _wait_for_device(self, job: BucketJob) -> None:
        """Order what this thread does on a device behind the backward, and behind that alone."""
        if job.ready is None or job.gradients is None:
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(job.gradients.device)  # type: ignore[no-untyped-call]
            torch.cuda.set_stream(self._stream)  # of this thread
        self._stream.wait_event(job.ready)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = error
            jobs = [*(flight.job for flight in self._under_way()), self._job]
            while not self._queue.empty():
                jobs.append(self._queue.get_nowait())
        for job in dict.fromkeys(jobs):
            if job is not None:
                job.done(error)

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
            flight.memory = self.buffers.open(chunk, flight.job.wire)

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
        for peer, pending in _turned(flight.pushes, flight.number):
            self._timeouts.wait(pending, peer, part=_PUSH_PART)
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
        for peer, pending in [*_turned(flight.pulls, flight.number), *flight.sends]:
            self._timeouts.wait(pending, peer)
        gradients = flight.job.gradients
        if gradients is not None:
            assert flight.memory is not None
            chunk = gradients[flight.edges[0] : flight.edges[-1]]
            self.buffers.close(flight.memory, chunk)
        for buffer in flight.borrowed:
            self.buffers.give(buffer)
        if flight.edges[-1] == flight.job.num_elements:
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

    def _receive(
        self, flight: Flight, peer: int, part: torch.Tensor, *, pull: bool
    ) -> tuple[int, Pending]:
        pending = self._transport.receive(part, peer, chunk_tag(flight, pull=pull))
        self.received_bytes += part.nbytes
        return peer, pending

    def _send(self, flight: Flight, peer: int, part: torch.Tensor, *, pull: bool) -> None:
        pending = self._transport.send(part, peer, chunk_tag(flight, pull=pull))
        flight.sends.append((peer, pending))
        self.sent_bytes += part.nbytes


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
