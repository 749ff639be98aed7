"""A transport that sees when what it receives arrives, and what that says of the ways to a rank."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from time import monotonic
from typing import final

import torch

from ._pipeline import is_pull
from ._transport import AbstractTransport, Pending

HEAD_BYTES = 64
LEAST_BYTES = 4096
"""What is smaller goes in one piece and is not timed."""

_HEAD = 1 << 29  # above the tags of chunks, below those of orders
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


_Watched = tuple[int, int, Pending, Pending, Future[None]]
"""A receive under way, in two parts, that a thread beside waits for: from whom, of how many bytes,
its parts, and what is set when both are here."""


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
        self._arrivals: deque[Arrival] = deque(maxlen=_MOST)
        self._lanes: dict[tuple[int, bool], SimpleQueue[_Watched | None]] = {}
        self._threads: list[threading.Thread] = []

    def receive(self, buffer: torch.Tensor, source: int, tag: int) -> Pending:
        if buffer.nbytes < LEAST_BYTES:
            return self._transport.receive(buffer, source, tag)
        first = HEAD_BYTES // buffer.itemsize
        head = self._transport.receive(buffer[:first], source, tag + _HEAD)
        rest = self._transport.receive(buffer[first:], source, tag)
        done: Future[None] = Future()
        watched = source, buffer.nbytes, head, rest, done
        self._lane(source, pull=is_pull(tag)).put(watched)
        return partial(_wait_for, done)

    def send(self, buffer: torch.Tensor, target: int, tag: int) -> Pending:
        if buffer.nbytes < LEAST_BYTES:
            return self._transport.send(buffer, target, tag)
        first = HEAD_BYTES // buffer.itemsize
        head = self._transport.send(buffer[:first], target, tag + _HEAD)
        return partial(_wait_for_both, head, self._transport.send(buffer[first:], target, tag))

    def break_off(self) -> None:
        self._transport.break_off()

    def take_arrivals(self) -> list[Arrival]:
        """Return what arrived since the last call, in order of its end, and forget it."""
        return [self._arrivals.popleft() for _ in range(len(self._arrivals))]

    def close(self) -> None:
        """End the threads, once nothing is under way. May be called again."""
        for lane in self._lanes.values():
            lane.put(None)
        for thread in self._threads:
            thread.join()
        self._lanes.clear()
        self._threads.clear()

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
            peer, num_bytes, head, rest, done = watched
            try:
                head(None)
                begin_s = self._clock()
                rest(None)
                self._arrivals.append(Arrival(peer, num_bytes, begin_s, self._clock()))
                done.set_result(None)
            except RuntimeError as error:
                done.set_exception(error)


def _wait_for(done: Future[None], limit_s: float | None) -> None:
    try:
        done.result(limit_s)
    except TimeoutError as error:
        raise RuntimeError(f"nothing came for {limit_s} s") from error


def _wait_for_both(head: Pending, rest: Pending, limit_s: float | None) -> None:
    head(limit_s)
    rest(limit_s)


Span = tuple[float, float]
Way = tuple[int, int, int, float]
"""Sender, receiver, bytes and seconds of all that one rank got of another in one exchange.

Bytes that only mark a beginning do not count. The seconds are what the others took of the links
between the two, or of the receiver's alone, where it is the sender too: for all that it got.
"""


def ways_to(receiver: int, arrivals: Iterable[Arrival], *, burst_bytes: int = 1 << 14) -> list[Way]:
    r"""Return what each rank sent to ``receiver``, and what that took of the links between them.

    The rows are those that ``Transfers.from_rows`` takes.

    The time in which any of it was under way, each moment once, and of every pause $p$ before a
    part of it as much as a shaped link may save up: of a token bucket that was idle,
    ``burst_bytes`` pass at once, shared by the $m$ senders, so $\min(p, \beta T / n)$ with
    $\beta$ the burst over $m$, $n$ the bytes and $T$ the very answer.

    Right where parts are several times as long as the burst. A link without bursts, but with
    pauses, looks slower than it is by at most $\beta$ over the bytes of a part; one whose parts
    are no longer than $\beta$ counts with all pauses, so that it carries no more than it was
    asked for.

    A way that was used while others of the same link paused had more of it than its share, and the
    rates of all add up to more than the link carries: to several times as much, where parts are
    short and come one after the other. So the last way is that of the rank to itself: all that
    came, and the time in which anything did, pauses counted likewise.

    Args:
        receiver: this rank.
        arrivals: of one exchange, as ``WatchedTransport.take_arrivals`` has them.
        burst_bytes: what links may let through at once, at least 0. Rather too little: a link that
            looks faster than it is will be used, and be seen as it is, and one that looks slower
            will not.
    """
    spans: defaultdict[int, list[Span]] = defaultdict(list)
    num_bytes: defaultdict[int, int] = defaultdict(int)
    for one in arrivals:
        spans[one.peer].append((one.begin_s, one.end_s))
        num_bytes[one.peer] += one.num_bytes - HEAD_BYTES
    burst = burst_bytes / max(len(spans), 1)
    ways = [
        (peer, receiver, num_bytes[peer], _taken_s(spans[peer], burst / num_bytes[peer]))
        for peer in sorted(spans)
    ]
    if ways:
        total, every = sum(num_bytes.values()), [span for each in spans.values() for span in each]
        ways.append((receiver, receiver, total, _taken_s(every, burst_bytes / total)))
    return ways


def lasted_s(arrivals: Sequence[Arrival]) -> float:
    """Return the seconds from the first bytes that came to the last; 0 if nothing did."""
    if not arrivals:
        return 0.0
    return max(one.end_s for one in arrivals) - min(one.begin_s for one in arrivals)


def covered(spans: Iterable[Span]) -> tuple[float, list[float]]:
    """Return the length of the union of intervals, and those of the pauses in it."""
    seconds, pauses, until = 0.0, list[float](), None
    for begin, end in sorted(spans):
        if until is None:
            until = begin
        if begin > until:
            pauses.append(begin - until)
        seconds += max(end - max(begin, until), 0.0)
        until = max(end, until)
    return seconds, pauses


def _taken_s(spans: Sequence[Span], part: float) -> float:
    """Return the largest $T$ that is the union plus ``min(pause, part * T)`` of each pause."""
    seconds, pauses = covered(spans)
    taken_s = seconds + sum(pauses)
    pauses.sort()
    # Pauses at most part * T count whole, the longer ones as that: tried from all whole down.
    for whole in range(len(pauses), -1, -1):
        cut = len(pauses) - whole
        if cut * part >= 1:
            break
        taken_s = (seconds + sum(pauses[:whole])) / (1 - cut * part)
        if not whole or pauses[whole - 1] <= part * taken_s:
            break
    return taken_s
