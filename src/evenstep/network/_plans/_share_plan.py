"""Whether shares are worth it, and the integers from which all ranks derive the same ranges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Self, final

import numpy as np

from ..._types import Cluster, FloatArray, check_range
from ...exceptions import invalid
from ...solve._allocate import apportion, in_proportion
from ._aggregation import Aggregation, Links, check_integer
from ._duration import check_shares, exchange_s, ring_s
from ._optimum import lower_bound_s

PARTS = 1 << 20
"""What the parts of a split add up to: shares to a millionth, and halves and quarters exactly."""

Edges = tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class Split:
    """Which rank sums which part of everything, as integers decided on one rank.

    Every rank cuts every chunk by the same integers with ``cut``, so CPUs that round floats
    differently still agree. A later split has a larger epoch.

    Args:
        parts: how many of 2**20 parts each rank sums, at least 0, adding up to that,
            ``(world_size,)``. Make them of shares with ``Split.of``.
        epoch: number of the plan, at least 0, larger than of those before.
        chunk_bytes: approximate size of a chunk of a bucket, at least 1. Small chunks overlap
            better, but each chunk costs messages.
        min_bytes: least bytes of a rank's range within a chunk, at least 0. A smaller range goes to
            the other ranks.

    Raises:
        ValueError: the parts do not add up, or an argument is out of range.
    """

    parts: tuple[int, ...]
    epoch: int = 0
    chunk_bytes: int = 1 << 20
    min_bytes: int = 1 << 12

    def __post_init__(self) -> None:
        parts = self.parts
        if type(parts) is not tuple or not all(type(one) is int and one >= 0 for one in parts):
            rule = "be a tuple of integers >= 0"
            raise invalid("Split(parts=...)", rule, parts, "Use `Split.of(shares)`.")
        if sum(parts) != PARTS:
            rule = f"add up to {PARTS}"
            got = f"{parts}, which is {sum(parts)}"
            raise invalid("Split(parts=...)", rule, got, "Use `Split.of(shares)`.")
        for name, least in (("epoch", 0), ("chunk_bytes", 1), ("min_bytes", 0)):
            value, remedy = getattr(self, name), "See its description."
            check_integer(f"Split({name}=...)", value, least, remedy)

    @classmethod
    def of(
        cls,
        shares: FloatArray,
        *,
        epoch: int = 0,
        chunk_bytes: int = 1 << 20,
        min_bytes: int = 1 << 12,
    ) -> Self:
        """Return the split with these shares, by largest remainder. Call it on one rank.

        Args:
            shares: at least 0, adding up to 1, ``(world_size,)``. A share of 0 stays 0.
            epoch, chunk_bytes, min_bytes: as above.

        Raises:
            ValueError: as above, or the shares are invalid.
        """
        given = np.asarray(shares, np.float64)
        if given.ndim != 1 or not given.size or not (given >= 0).all():
            rule = "be at least 0, (world_size,)"
            raise invalid("Split.of(shares)", rule, shares, "Give one share per rank.")
        if abs(given.sum() - 1) > 1e-6:
            raise invalid("Split.of(shares)", "add up to 1", given, "Divide them by their sum.")
        parts = np.zeros(len(given), np.int64)
        serves = given > 0
        parts[serves] = apportion(given[serves], Cluster(int(serves.sum()), PARTS, 0))
        return cls(tuple(map(int, parts)), epoch, chunk_bytes, min_bytes)

    @property
    def world_size(self) -> int:
        """Number of ranks, servers without data among them."""
        return len(self.parts)

    def chunks(self, num_elements: int, element_bytes: int) -> list[Edges]:
        """Return the chunks of a bucket, each as the edges of the ranks' ranges in it.

        There are as few chunks of at most ``chunk_bytes`` as possible, nearly equal in size, each
        cut by ``parts``. The ranges of a chunk begin where those of the chunk before end.

        Args:
            num_elements: of the bucket, at least 0.
            element_bytes: size of one on the wire, at least 1.

        Returns:
            For each chunk: rank r sums elements ``edges[r]`` to ``edges[r + 1]`` of the bucket.
        """
        most = max(1, self.chunk_bytes // element_bytes)
        least = max(1, -(-self.min_bytes // element_bytes))
        num_chunks = -(-num_elements // most)
        if not num_chunks:
            return []
        ends = [chunk * num_elements // num_chunks for chunk in range(num_chunks + 1)]
        spans = list(pairwise(ends))
        sizes = {end - start for start, end in spans}
        of_size = {size: cut(size, self.parts, min_elements=least) for size in sizes}
        return [tuple(start + edge for edge in of_size[end - start]) for start, end in spans]


def cut(num_elements: int, parts: Sequence[int], *, min_elements: int = 1) -> Edges:
    r"""Cut elements into one range per rank, in proportion to integers, with integers alone.

    By largest remainder of $n p_i / P$, at equal ones to the lower ranks. Before that, as long as a
    rank would get less than ``min_elements``, the rank with the least parts gets nothing, at equal
    ones the higher, and the others share its elements. One always keeps all. Where there are fewer
    elements than ranks, some get none.

    Args:
        num_elements: $n$, at least 0.
        parts: $p_i$, at least 0, one at least positive, ``(world_size,)``.
        min_elements: least elements of a range that is not empty, at least 0.

    Returns:
        From 0 to ``num_elements``, never falling: rank r has those from ``edges[r]`` up to
        ``edges[r + 1]``, ``(world_size + 1,)``.
    """
    kept = sorted((rank for rank, part in enumerate(parts) if part), key=lambda r: (-parts[r], r))
    weights, total = list(parts), sum(parts)
    while len(kept) > 1 and parts[kept[-1]] * num_elements < min_elements * total:
        least = kept.pop()
        weights[least], total = 0, total - parts[least]
    return tuple(accumulate(in_proportion(num_elements, weights).tolist(), initial=0))


def traffic_bytes(
    split: Split, num_elements: int, element_bytes: int, *, workers: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return what each rank sends and receives for one bucket: push and pull, without headers.

    The figures are exact, from the ranges of ``Split.chunks``. A rank sends its gradients except
    for what it sums itself, and sends its sums to every other worker. If all workers are servers,
    it receives as much as it sends.

    Args:
        split: which rank sums what.
        num_elements: of the bucket, at least 0.
        element_bytes: size of one on the wire, at least 1.
        workers: the ranks that have gradients.

    Returns:
        Bytes sent and bytes received, each ``(world_size,)``.
    """
    sent, received = [0] * split.world_size, [0] * split.world_size
    for edges in split.chunks(num_elements, element_bytes):
        for server in range(split.world_size):
            num_bytes = (edges[server + 1] - edges[server]) * element_bytes
            for worker in workers:
                if worker != server:  # a push one way, a pull the other
                    for rank in (worker, server):
                        sent[rank] += num_bytes
                        received[rank] += num_bytes
    return tuple(sent), tuple(received)


@dataclass(frozen=True, slots=True, eq=False)
class SharePlan:
    """What each rank sums, what that takes by the model, and what plain all-reduce would.

    Attributes:
        parts: who sums how much, as ``Split`` has it.
        exchange_s: predicted seconds of push and pull by these parts.
        ring_s: of plain all-reduce, a ring in rank order.
        falls_back: whether plain all-reduce is to be used.
        reason: why, in words.
    """

    parts: tuple[int, ...]
    exchange_s: float
    ring_s: float
    falls_back: bool
    reason: str

    @property
    def shares(self) -> FloatArray:
        """The parts as shares that add up to 1, ``(world_size,)``."""
        shares: FloatArray = np.array(self.parts) / PARTS
        return shares

    @property
    def gain(self) -> float:
        """How many times as fast as plain all-reduce the shares are predicted to be."""
        return self.ring_s / self.exchange_s if self.exchange_s > 0 else 1.0


def plan_shares(
    aggregation: Aggregation, links: Links, *, shares: FloatArray, margin: float = 0.15
) -> SharePlan:
    """Turn shares into integers, and compare them with plain all-reduce.

    The plan falls back to plain all-reduce, and says so, unless a ring in rank order is predicted
    to take more than ``1 + margin`` times as long.

    Args:
        aggregation: what is summed, by whom, in how many chunks.
        links: their bandwidths.
        shares: as a policy decided them, ``(world_size,)``.
        margin: what shares have to gain, at least 0. On equal links, where model and ring agree,
            exchanges of this kind were measured to be up to 15 % slower than all-reduce.

    Raises:
        ValueError: the links or shares are of other ranks, or ``margin`` is out of range.
    """
    check_range("plan_shares(margin=...)", margin, "finite and at least 0", "0.15 is 15 %.")
    check_shares("plan_shares", aggregation, shares)
    parts = Split.of(shares).parts
    exact_s = exchange_s(aggregation, links, shares=np.array(parts) / PARTS)
    plain_s = ring_s(aggregation, links)
    bound_s = lower_bound_s(aggregation, links)
    compared = f"{exact_s:.3g} s against {plain_s:.3g} s of a ring"
    if aggregation.num_workers == 1:
        reason = "plain all-reduce: a single worker has nothing to sum"
    elif plain_s > exact_s * (1 + margin):
        reason = f"shares: {compared}, {plain_s / exact_s:.2f} times as fast"
    elif plain_s > bound_s * (1 + margin):
        reason = f"plain all-reduce: these shares take {compared}, no gain of {margin:.0%}"
    else:
        reason = f"plain all-reduce: no shares gain {margin:.0%} here, these take {compared}"
    return SharePlan(parts, exact_s, plain_s, not plain_s > exact_s * (1 + margin), reason)
