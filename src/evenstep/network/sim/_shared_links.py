"""What an exchange by shares adds to a simulated step, and when such a step ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from ..._types import FloatArray
from ..._valid import check_fields, check_range
from .._plans._aggregation import Aggregation, Links
from .._plans._duration import exchange_s, ring_s
from .._plans._optimum import equal_shares

MANY = 64  # chunks that stand for their limit
REMEDY = "0 exchanges at the end, 2/3 during the backward."


@final
@dataclass(frozen=True, slots=True, eq=False)
class SharedLinksComm:
    r"""Gradients are pushed, summed and pulled over links of different speeds.

    A step ends as ``timeline_s`` has it: who is done early pushes early. Without
    shares it is a plain all-reduce that begins when the slowest is done,
    $\max(t, (1 - h) t + R)$ of a ring that takes $R$ and gradients that are ready over the
    last part $h$ of computing, and at least a chunk's part of $R$ after it.

    Args:
        aggregation: what is summed, by whom, in how many chunks; the simulated workers are its
            ranks, those that only serve included.
        links: what they carry.
        shares: part of the bytes that each rank sums, ``(world_size,)``; None for plain all-reduce.
        overlap: part of computing, at its end, during which gradients become ready, in [0, 1].

    Raises:
        ValueError: an argument is out of range, or they speak of other ranks.
    """

    aggregation: Aggregation
    links: Links
    shares: FloatArray | None = None
    overlap: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, overlap=("in [0, 1]", REMEDY))
        shares = equal_shares(self.aggregation) if self.shares is None else self.shares
        exchange_s(self.aggregation, self.links, shares=shares)  # refuses those of other ranks

    def __call__(self, compute_s: FloatArray) -> float:
        """Return the seconds of a step, by when each worker ends computing, ``(world_size,)``."""
        if self.shares is not None:
            return timeline_s(
                compute_s, self.aggregation, self.links, shares=self.shares, overlap=self.overlap
            )
        slowest = float(compute_s[self.aggregation.is_worker].max())
        ring = ring_s(self.aggregation, self.links)
        last = ring / (self.aggregation.num_chunks or MANY)
        return max((1 - self.overlap) * slowest + ring, slowest + last)


def timeline_s(
    compute_s: FloatArray,
    aggregation: Aggregation,
    links: Links,
    *,
    shares: FloatArray,
    overlap: float = 0.0,
) -> float:
    r"""Return the seconds from a common start until all workers have all sums.

    Chunk $k$ of $C$ is ready on worker $i$ at $t_i (1 - h + h (k + 1) / C)$. Every rank has a
    queue up and one down. Up, it pushes chunk $k$ as soon as that is ready and then sends the sums
    of the chunk before, each when all pushes of it are there; down, it gets what others send, no
    sooner than they have sent it. What waits does not keep the link busy. So a worker that is done
    early pushes early, and its sums wait for the last one all the same.

    With all done at once it is between $A$ and the lock-step $T_C$ of ``exchange_s``. Left out:
    that senders share a receiver, which moves single messages but not the sum of a queue.
    Pairs and half duplex are not looked at.

    Args:
        compute_s: seconds of computing, ignored of ranks that only serve, ``(world_size,)``.
        aggregation: what is summed, by whom, in how many chunks.
        links: what each rank's link carries.
        shares: part of the bytes that each rank sums, ``(world_size,)``.
        overlap: $h$, in [0, 1]: 0 if nothing is exchanged before computing ends, about two thirds
            if buckets go while the backward runs.

    Raises:
        ValueError: ``overlap`` is out of range.
    """
    check_range("timeline_s(overlap=...)", overlap, "in [0, 1]", REMEDY)
    works, serves = aggregation.is_worker, shares > 0
    if aggregation.num_workers == 1 and (works & serves).any() and shares[works].sum() > 1 - 1e-9:
        return float(compute_s[works].max())
    chunks = aggregation.num_chunks or MANY
    done_s = np.where(works, compute_s, 0.0)
    part = aggregation.num_bytes / chunks
    gives, takes = works * (1 - shares), aggregation.num_sources * shares
    give_s = gives * part / links.up_bytes_per_s, gives * part / links.down_bytes_per_s
    take_s = takes * part / links.up_bytes_per_s, takes * part / links.down_bytes_per_s
    up, down = np.zeros(len(shares)), np.zeros(len(shares))
    summed, ended = np.zeros(len(shares)), 0.0
    for chunk in range(chunks + 1):
        before = summed
        if chunk < chunks:
            ready = done_s * (1 - overlap + overlap * (chunk + 1) / chunks)
            up, down, sent = _sent(up, down, np.where(works, ready, np.inf), give_s[0], take_s[1])
            summed = np.maximum(np.maximum(down, sent), np.where(works, ready, 0.0))
            summed = summed + links.latency_s
        if chunk:
            up, down, sent = _sent(up, down, np.where(serves, before, np.inf), take_s[0], give_s[1])
            ended = float(np.where(works, np.maximum(down, sent), 0.0).max())
    return max(ended, float(done_s.max())) + links.latency_s


def _sent(
    up: FloatArray, down: FloatArray, ready: FloatArray, up_s: FloatArray, down_s: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return both queues after one more message of all, and when all others' are sent, for each.

    Who has nothing to send is ready at infinity.
    """
    sends = np.isfinite(ready)
    start = np.where(sends, np.maximum(up, ready), np.inf)
    up = np.where(sends, start + up_s, up)
    down = np.where(down_s > 0, np.maximum(down, _least_other(start)) + down_s, down)
    return up, down, _most_other(np.where(sends, up, 0.0))


def _least_other(values: FloatArray) -> FloatArray:
    """Return the least of all others' values, for each."""
    return -_most_other(-values)


def _most_other(values: FloatArray) -> FloatArray:
    """Return the most of all others' values, for each."""
    first = int(np.argmax(values))
    others: FloatArray = np.full(len(values), values[first])
    rest = np.delete(values, first)
    others[first] = rest.max() if len(rest) else -np.inf
    return others
