"""How trainers divide the samples of a step, each as an owner of every sample.

All are written from what the projects document, for equal workers unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

import numpy as np

from evenstep import AffineTime, Cluster, allocate
from evenstep.solve import WorkerCosts, partition

LINEAR = 24576
Contestant = Callable[..., np.ndarray]


def equal_count(length: np.ndarray, speed: np.ndarray, *, padded: bool) -> np.ndarray:
    """Plain DDP: as many samples for each, in the order they come."""
    return np.arange(len(length)) * len(speed) // len(length)


def speed_only(length: np.ndarray, speed: np.ndarray, *, padded: bool) -> np.ndarray:
    """Counts in proportion to speed, in the order they come: evenstep without costs."""
    times = AffineTime(intercept_s=np.zeros(len(speed)), slope_s=1.0 / speed)
    least = 1 if len(length) >= len(speed) else 0
    sizes = allocate(times, Cluster(len(speed), len(length), min_batch_size=least))
    return np.repeat(np.arange(len(speed)), sizes)


def karmarkar_karp(length: np.ndarray, speed: np.ndarray, *, padded: bool) -> np.ndarray:
    """verl's costs, `24576 L + L**2`, by the largest differencing method, for equal workers."""
    cost = LINEAR * length + length**2
    heap = []
    for sample, one in enumerate(cost.tolist()):
        sums = [(0, [])] * (len(speed) - 1) + [(one, [sample])]
        heap.append((-one, sample, sums))
    heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        (_, _, one), (_, _, two) = heappop(heap), heappop(heap)
        merged = sorted(
            ((a + b, c + d) for (a, c), (b, d) in zip(one, reversed(two), strict=True)),
            key=lambda part: part[0],
        )
        number += 1
        heappush(heap, (merged[0][0] - merged[-1][0], number, merged))
    owner = np.empty(len(length), np.int64)
    for rank, (_, samples) in enumerate(heap[0][2]):
        owner[samples] = rank
    return owner


def _greedy(cost: np.ndarray, num_ranks: int) -> np.ndarray:
    load, owner = [(0.0, rank) for rank in range(num_ranks)], np.empty(len(cost), np.int64)
    for sample in np.argsort(-cost, kind="stable").tolist():
        least, rank = heappop(load)
        owner[sample] = rank
        heappush(load, (least + float(cost[sample]), rank))
    return owner


def rebalance_sampler(length: np.ndarray, speed: np.ndarray, *, padded: bool) -> np.ndarray:
    """The cost of transformers' `BatchRebalanceSampler`, `L + 0.001 L**2`, longest first."""
    return _greedy(length + 0.001 * length**2, len(speed))


def token_budget(length: np.ndarray, speed: np.ndarray, *, padded: bool) -> np.ndarray:
    """First fit into an equal budget of tokens; what fits nowhere goes where least is."""
    budget = -(-int(length.sum()) // len(speed))
    held, owner = np.zeros(len(speed)), np.empty(len(length), np.int64)
    for sample in np.argsort(-length, kind="stable"):
        fits = np.flatnonzero(held + length[sample] <= budget)
        owner[sample] = rank = fits[0] if len(fits) else held.argmin()
        held[rank] += length[sample]
    return owner


def ours(length: np.ndarray, speed: np.ndarray, *, padded: bool) -> np.ndarray:
    """`evenstep.solve.partition`."""
    slow = 4 // speed
    costs = WorkerCosts(np.stack([LINEAR * slow, slow], 1), np.zeros(len(speed), np.int64))
    return partition(np.stack([length, length**2], 1), costs, padded=padded).owner


CONTESTANTS: dict[str, Contestant] = {
    "equal_count": equal_count,
    "speed_only": speed_only,
    "karmarkar_karp": karmarkar_karp,
    "rebalance_sampler": rebalance_sampler,
    "token_budget": token_budget,
    "ours": ours,
}
