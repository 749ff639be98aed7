"""Carries tensors between owners, in chunks, and says who is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Self, final

import torch

from .._reduce._buffers import Buffers
from .._reduce._failure import Failure
from .._reduce._timeouts import Timeouts
from .._reduce._traffic import LinkTraffic
from .._reduce._transport import AbstractTransport, PeerFailed, Pending

_FIRST_TAG = 2  # notices of losses have 1
_TAGS = 1 << 30


@final
@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """Tensors that go to others, the same to each.

    Attributes:
        fields: flat tensors.
        targets: who gets them.
    """

    fields: Sequence[torch.Tensor]
    targets: Sequence[int]


@dataclass(slots=True, eq=False)
class _Round:
    """One chunk from and to all ranks, under way."""

    receipts: list[tuple[int, Pending, list[torch.Tensor], torch.Tensor]] = field(
        default_factory=list
    )
    sends: list[tuple[int, Pending]] = field(default_factory=list)
    borrowed: list[tuple[torch.Tensor, bool]] = field(default_factory=list)


@final
class Carrier:
    """Sends and receives on the calling thread; a thread beside it looks at the clock.

    Messages between two ranks are matched by their number, so that both have to ask for the same
    ones, in the same order.

    Args:
        transport: matched by tag, in host memory, for nothing else.
        timeout_s: how long a rank may keep another one waiting.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        transport: AbstractTransport,
        *,
        timeout_s: float,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._transport = transport
        self._failure = Failure(
            transport,
            where="the exchange of parameters",
            option="ShardedOptimizer(timeout_s=...)",
        )
        self._timeouts = Timeouts(timeout_s, give_up=self._give_up, clock=clock)
        self._buffers = Buffers()
        self._num_sent: Counter[int] = Counter()
        self._num_received: Counter[int] = Counter()
        self._sent_bytes = self._received_bytes = 0
        self._failure.start()
        self._timeouts.start()

    @property
    def peers(self) -> list[int]:
        """All other ranks of the transport."""
        return [rank for rank in range(self._transport.world_size) if rank != self._transport.rank]

    @property
    def traffic(self) -> LinkTraffic:
        """What ``carry`` moved so far over this rank's links."""
        return LinkTraffic(self._sent_bytes, self._received_bytes)

    def check(self) -> None:
        """Raise what ended an earlier exchange, if anything did."""
        self._failure.check()

    @contextmanager
    def in_exchange(self) -> Iterator[Self]:
        """Go around what all ranks do: whatever is raised inside ends the others' waits as well.

        Raises:
            WorkerLostError: a rank was lost.
        """
        try:
            yield self
        except BaseException as error:
            failure = self._failure.on(error)
            self._timeouts.close()
            raise failure from (error if failure is not error else None)

    def close(self) -> None:
        """End the thread. May be called again."""
        self._timeouts.close()

    def tell(self, message: torch.Tensor) -> list[torch.Tensor]:
        """Return the messages of all ranks, each a tensor of the same shape.

        Raises:
            PeerFailed: a rank is gone.
        """
        told = [torch.empty_like(message) for _ in range(self._transport.world_size)]
        told[self._transport.rank] = message
        receipts = [(peer, self._receive(told[peer], peer)) for peer in self.peers]
        sends = [(peer, self._send(message, peer)) for peer in self.peers]
        for peer, pending in [*receipts, *sends]:
            self._timeouts.wait(pending, peer)
        return told

    def carry(
        self,
        parcels: Sequence[Parcel],
        arrivals: Mapping[int, Sequence[torch.Tensor]],
        *,
        chunk_bytes: int,
    ) -> None:
        """Send parcels, and fill tensors with what others send; two chunks are under way at once.

        Args:
            parcels: at most one for each target.
            arrivals: by sender, flat tensors as large and of the types as that one's parcel.
            chunk_bytes: about how much goes in one message, the same on all ranks.

        Raises:
            PeerFailed: a rank is gone.
        """
        outward = [(chunks(parcel.fields, chunk_bytes), parcel.targets) for parcel in parcels]
        inward = {peer: chunks(fields, chunk_bytes) for peer, fields in arrivals.items()}
        most = max([len(each) for each in [*inward.values(), *(c for c, _ in outward)]], default=0)
        before: _Round | None = None
        for index in range(most):
            new = self._begin(index, outward, inward)
            if before is not None:
                self._end(before)
            before = new
        if before is not None:
            self._end(before)

    def _begin(
        self,
        index: int,
        outward: Sequence[tuple[list[list[torch.Tensor]], Sequence[int]]],
        inward: Mapping[int, list[list[torch.Tensor]]],
    ) -> _Round:
        new = _Round()
        for peer, parts in inward.items():
            if index < len(parts):
                memory = self._memory(parts[index], new)
                self._received_bytes += memory.nbytes
                new.receipts.append((peer, self._receive(memory, peer), parts[index], memory))
        for parts, targets in outward:
            if index >= len(parts):
                continue
            memory = self._memory(parts[index], new)
            _pack(parts[index], memory)
            for peer in targets:
                self._sent_bytes += memory.nbytes
                new.sends.append((peer, self._send(memory, peer)))
        return new

    def _end(self, old: _Round) -> None:
        for peer, pending, fields, memory in old.receipts:
            self._timeouts.wait(pending, peer)
            _unpack(memory, fields)
        for peer, pending in old.sends:
            self._timeouts.wait(pending, peer)
        for buffer, pinned in old.borrowed:
            self._buffers.give(buffer, pinned=pinned)

    def _memory(self, fields: Sequence[torch.Tensor], new: _Round) -> torch.Tensor:
        """Return bytes on the host for ``fields``: their own where there is one alone."""
        if len(fields) == 1 and fields[0].device.type == "cpu":
            return fields[0].view(torch.uint8)
        num_bytes, pinned = sum(each.nbytes for each in fields), fields[0].is_cuda
        cpu = torch.device("cpu")
        buffer = self._buffers.take(num_bytes, torch.uint8, cpu, pinned=pinned)
        new.borrowed.append((buffer, pinned))
        return buffer[:num_bytes]

    def _receive(self, buffer: torch.Tensor, peer: int) -> Pending:
        self._num_received[peer] += 1
        return self._transport.receive(buffer, peer, _tag(self._num_received[peer]))

    def _send(self, buffer: torch.Tensor, peer: int) -> Pending:
        self._num_sent[peer] += 1
        return self._transport.send(buffer, peer, _tag(self._num_sent[peer]))

    def _give_up(self, peer: int, waited_s: float) -> None:
        self._failure.on(PeerFailed(peer, f"nothing came from it for {waited_s:.1f} s"))


def chunks(fields: Sequence[torch.Tensor], chunk_bytes: int) -> list[list[torch.Tensor]]:
    """Cut flat tensors into chunks of at most ``chunk_bytes``, by their sizes and types alone.

    A chunk holds an element at least, and parts of as many tensors as fit.
    """
    parted: list[list[torch.Tensor]] = []
    room = 0
    for each in fields:
        start = 0
        while start < each.numel():
            fits = room // each.itemsize
            if not fits:
                parted.append([])
                room = max(chunk_bytes, each.itemsize)
                continue
            part = each[start : start + fits]
            parted[-1].append(part)
            room -= part.nbytes
            start += part.numel()
    return parted


def _pack(fields: Sequence[torch.Tensor], memory: torch.Tensor) -> None:
    start = 0
    for each in fields:
        if each.data_ptr() != memory.data_ptr():
            memory[start : start + each.nbytes].copy_(each.view(torch.uint8))
        start += each.nbytes


def _unpack(memory: torch.Tensor, fields: Sequence[torch.Tensor]) -> None:
    start = 0
    for each in fields:
        if each.data_ptr() != memory.data_ptr():
            each.view(torch.uint8).copy_(memory[start : start + each.nbytes])
        start += each.nbytes


def _tag(number: int) -> int:
    return _FIRST_TAG + number % _TAGS
