"""A transport that sees when what it receives begins to arrive, and when all of it is there."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from time import monotonic
from typing import Self, final

import torch

from ._pipeline import is_pull
from ._transport import AbstractTransport, Pending

HEAD_BYTES = 64
LEAST_BYTES = 4096
"""What is smaller goes in one piece and is not timed."""

_HEAD = 1 << 29  # above the tags of chunks, below those of roll calls and orders
_MOST = 1 << 14  # of the newest, for a controller that never collects them


@dataclass(frozen=True, slots=True)
class Arrival:
    """One range of one chunk, as it came.

    Attributes:
        peer: who sent it, a rank of the reducing group.
        num_bytes: its size.
        begin_s: when its first bytes were there.
        end_s: when its last bytes were there.
    """

    peer: int
    num_bytes: int
    begin_s: float
    end_s: float


@final
class WatchedTransport(AbstractTransport):
    """Times what arrives: the first 64 bytes of a range go ahead as a message of their own.

    A receiver cannot know when the other end began to send: a server waits for its slowest
    worker before it answers, and that time says nothing about its link. Nor does it know when all
    was there if it first waited for another rank. Between two messages in a row on one connection
    nothing lies but the second one's bytes, and a thread per peer and direction sees both arrive.
    No clocks are compared.

    What is smaller than 4096 bytes is not timed. One more message for each range that is, and
    what a thread costs to wake twice: some 0.1 ms, much less than the range takes on links for
    which shares are worth their while. All ranks of a group have to use it, or none. Threads start
    with the first receive.

    Right where the network is slow enough to be the limit. A link that lets a burst through
    after a pause, as a token bucket does, looks faster for it, unless a chunk has several times
    the burst's bytes.

    Args:
        transport: what it sends and receives over.
        clock: monotonic seconds.
    """

    def __init__(
        self, transport: AbstractTransport, *, clock: Callable[[], float] = monotonic
    ) -> None:
        self._transport = transport
        self._clock = clock
        self.rank, self.world_size = transport.rank, transport.world_size
        self.ranks = transport.ranks
        self._arrivals: deque[Arrival] = deque(maxlen=_MOST)
        self._lanes: dict[tuple[int, bool], SimpleQueue[_Watched | None]] = {}
        self._threads: list[threading.Thread] = []

    def receive(self, buffer: torch.Tensor, source: int, tag: int) -> Pending:
        if buffer.nbytes < LEAST_BYTES:
            return self._transport.receive(buffer, source, tag)
        first = HEAD_BYTES // buffer.itemsize
        head = self._transport.receive(buffer[:first], source, tag + _HEAD)
        rest = self._transport.receive(buffer[first:], source, tag)
        watched = _Watched(source, buffer.nbytes, head, rest)
        self._lane(source, pull=is_pull(tag)).put(watched)
        return watched

    def send(self, buffer: torch.Tensor, target: int, tag: int) -> Pending:
        if buffer.nbytes < LEAST_BYTES:
            return self._transport.send(buffer, target, tag)
        first = HEAD_BYTES // buffer.itemsize
        head = self._transport.send(buffer[:first], target, tag + _HEAD)
        return _Both(head, self._transport.send(buffer[first:], target, tag))

    def break_off(self) -> None:
        self._transport.break_off()

    def take_arrivals(self) -> list[Arrival]:
        """Return what arrived since the last call, in order of its end, and forget it."""
        arrivals = []
        while self._arrivals:
            arrivals.append(self._arrivals.popleft())
        return arrivals

    def close(self) -> None:
        """End the threads, once nothing is under way. May be called again."""
        for lane in self._lanes.values():
            lane.put(None)
        for thread in self._threads:
            thread.join()
        self._lanes.clear()
        self._threads.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _lane(self, source: int, *, pull: bool) -> SimpleQueue[_Watched | None]:
        """Return the queue of what comes from ``source`` one after the other.

        Pushes and pulls have one each: which of them comes first is not promised.
        """
        lane = self._lanes.get((source, pull))
        if lane is None:
            lane = self._lanes[source, pull] = SimpleQueue()
            name = f"evenstep-watch-{source}"
            thread = threading.Thread(target=self._watch, args=(lane,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()
        return lane

    def _watch(self, lane: SimpleQueue[_Watched | None]) -> None:
        while (watched := lane.get()) is not None:
            try:
                watched.head.wait()
                begin_s = self._clock()
                watched.rest.wait()
                end_s = self._clock()
            except RuntimeError as error:
                watched.failed(error)
                continue
            self._arrivals.append(Arrival(watched.peer, watched.num_bytes, begin_s, end_s))
            watched.done.set()


@final
class _Watched:
    """A receive under way, in two parts, that another thread waits for."""

    __slots__ = ("_error", "done", "head", "num_bytes", "peer", "rest")

    def __init__(self, peer: int, num_bytes: int, head: Pending, rest: Pending) -> None:
        self.peer, self.num_bytes = peer, num_bytes
        self.head, self.rest = head, rest
        self.done = threading.Event()
        self._error: RuntimeError | None = None

    def failed(self, error: RuntimeError) -> None:
        """Have the waiting thread raise ``error``."""
        self._error = error
        self.done.set()

    def wait(self, limit_s: float | None = None) -> None:
        if not self.done.wait(limit_s):
            raise RuntimeError(f"nothing came for {limit_s} s")
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error


@final
class _Both:
    """Two sends under way."""

    __slots__ = ("_head", "_rest")

    def __init__(self, head: Pending, rest: Pending) -> None:
        self._head, self._rest = head, rest

    def wait(self, limit_s: float | None = None) -> None:
        self._head.wait(limit_s)
        self._rest.wait(limit_s)
