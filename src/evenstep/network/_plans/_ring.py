"""What plain all-reduce takes: a ring of all workers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..._types import FloatArray, IntArray
from ...exceptions import invalid
from ._aggregation import Aggregation
from ._bandwidths import Links, check_world

MOST_WORKERS = 12  # the search doubles with each, and takes some ten milliseconds with 12


def ring_s(aggregation: Aggregation, links: Links, *, order: Sequence[int] | None = None) -> float:
    r"""Return the seconds of a ring all-reduce among the workers.

    $2 \frac{N - 1}{N} \frac{V}{\text{slowest link}} + 2 (N - 1) \alpha$: each worker sends that
    much to the next, so the order matters only where pairs differ. Half duplex, a worker sends
    and receives in turn.

    It is what a ring costs that is pipelined without gaps; gloo's all-reduce was measured to take
    1.1 to 1.3 times that on shaped links. Libraries pick trees and other algorithms too.

    Args:
        aggregation: the bytes and the workers. Ranks that only serve are left out.
        links: their bandwidths.
        order: the workers' ranks around the ring; ascending if None, as libraries do that know
            nothing of the links.

    Raises:
        ValueError: the links are of other ranks, or ``order`` is not all workers, once each.

    References:
        P. Patarasuk and X. Yuan, *Bandwidth optimal all-reduce algorithms for clusters of
        workstations*, 2009.
    """
    check_world("ring_s", aggregation, links)
    workers = np.flatnonzero(aggregation.is_worker)
    ring = workers if order is None else np.asarray(order)
    if ring.dtype.kind not in "iu" or not np.array_equal(np.sort(ring), workers):
        rule, remedy = f"be the workers {workers.tolist()}, once each", "Leave servers out."
        raise invalid("ring_s(order=...)", rule, order, remedy)
    if len(ring) == 1:
        return 0.0
    slowest = float(_hops(links)[ring, np.roll(ring, -1)].min())
    slowest = min(slowest, float(links.bandwidth_bytes_per_s[ring].min()))
    rounds = 2 * (len(ring) - 1)
    return rounds / len(ring) * aggregation.num_bytes / slowest + rounds * links.latency_s


def best_ring(aggregation: Aggregation, links: Links) -> IntArray:
    """Return the order of the workers around the ring whose slowest hop is fastest.

    A well-ordered ring may avoid a slow link, with no code but a group of another order. Exact:
    the workers' own links count in any order, and over pairs it searches the slowest hop that
    some ring can keep above. For at most 12 workers.

    Returns:
        Ranks, from the lowest worker on, ``(num_workers,)``.

    Raises:
        ValueError: the links are of other ranks, or there are more than 12 workers.
    """
    check_world("best_ring", aggregation, links)
    workers = np.flatnonzero(aggregation.is_worker)
    if len(workers) > MOST_WORKERS:
        rule = f"have at most {MOST_WORKERS} workers"
        got, remedy = len(workers), "Order the ring by racks, and ask `ring_s` what it takes."
        raise invalid("best_ring(aggregation=...)", rule, got, remedy)
    ring: IntArray = workers.astype(np.int64)
    if links.pair_bytes_per_s is None or len(workers) < 3:
        return ring
    hops = _hops(links)[np.ix_(workers, workers)]
    values = np.unique(hops[~np.eye(len(workers), dtype=np.bool_)])
    keeps, above = -1, len(values)  # a ring in rank order keeps the smallest
    while above - keeps > 1:
        middle = (keeps + above) // 2
        found = _cycle(hops >= values[middle])
        if found:
            keeps, ring = middle, workers[found].astype(np.int64)
        else:
            above = middle
    return ring


def _hops(links: Links) -> FloatArray:
    """Return what goes from one rank (row) to another (column) at once."""
    hops = np.minimum(links.up_bytes_per_s[:, None], links.down_bytes_per_s[None, :])
    return hops if links.pair_bytes_per_s is None else np.minimum(hops, links.pair_bytes_per_s)


def _cycle(allowed: np.ndarray[tuple[int, int], np.dtype[np.bool_]]) -> list[int]:
    """Return a cycle through all over allowed hops, from 0 on, or nothing.

    Held and Karp's recursion on sets: ``ends[seen]`` are those that a path from 0 through exactly
    ``seen`` may end at, as bits.
    """
    size = len(allowed)
    sources = [
        sum(1 << row for row in range(size) if row != column and allowed[row, column])
        for column in range(size)
    ]
    ends = [0] * (1 << size)
    ends[1] = 1
    for seen in range(3, 1 << size, 2):
        for last in range(1, size):
            if seen >> last & 1 and ends[seen ^ 1 << last] & sources[last]:
                ends[seen] |= 1 << last
    seen, here = (1 << size) - 1, 0
    path: list[int] = []
    while len(path) < size - 1:
        choices = ends[seen] & sources[here]
        if not choices:
            return []
        path.append(choices.bit_length() - 1)
        here = path[-1]
        seen ^= 1 << here
    return [0, *reversed(path)]
