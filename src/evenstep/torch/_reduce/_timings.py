"""How long the real chunks took, and how many bytes went each way."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import final

_MOST = 1 << 14  # of the newest, for a controller that never collects them


@dataclass(frozen=True, slots=True)
class ChunkTiming:
    """One rank's receipt of one range of one chunk.

    Attributes:
        peer: who sent it, a rank of the reducing group.
        pull: whether it was a server's result rather than a worker's gradients.
        chunk: number of the chunk, from 0, counted over all buckets.
        num_bytes: its size.
        begin_s: when it was asked for, or when the last one from that peer was complete if that
            was later, on the reducer's clock.
        end_s: when it was found complete.
        waited_s: how long this rank stood waiting for it. Where that is 0, the range was complete
            at some time before ``end_s``: ``end_s - begin_s`` is then too long.
    """

    peer: int
    pull: bool
    chunk: int
    num_bytes: int
    begin_s: float
    end_s: float
    waited_s: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of gradients and sums since the start, headers apart.

    Attributes:
        sent_bytes, received_bytes: over the links of this rank.
    """

    sent_bytes: int
    received_bytes: int


@final
class Ledger:
    """Takes notes on the issuing thread, and hands them out on any other."""

    def __init__(self) -> None:
        self._rows: deque[tuple[int, bool, int, int, float, float, float]] = deque(maxlen=_MOST)
        self._complete_s: dict[tuple[int, bool], float] = {}
        self._sent_bytes = 0
        self._received_bytes = 0

    def sent(self, num_bytes: int) -> None:
        """Note that so much was sent."""
        self._sent_bytes += num_bytes

    def received(
        self,
        peer: int,
        chunk: int,
        num_bytes: int,
        *,
        pull: bool,
        asked_s: float,
        waits_s: float,
        end_s: float,
    ) -> None:
        """Note a receipt: when it was asked for, since when it was waited for, until when."""
        self._received_bytes += num_bytes
        begin_s = max(asked_s, self._complete_s.get((peer, pull), asked_s))
        self._complete_s[peer, pull] = end_s
        self._rows.append((peer, pull, chunk, num_bytes, begin_s, end_s, end_s - waits_s))

    def take(self) -> list[ChunkTiming]:
        """Return what was noted since the last call, oldest first, and forget it."""
        rows = []
        while self._rows:
            rows.append(ChunkTiming(*self._rows.popleft()))
        return rows

    @property
    def traffic(self) -> Traffic:
        """What went over this rank's links so far."""
        return Traffic(self._sent_bytes, self._received_bytes)
