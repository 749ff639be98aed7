"""Shares and times that have a formula: overlapped without end, or one phase alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..._types import FloatArray
from ._aggregation import Aggregation
from ._bandwidths import Links, check_world


@dataclass(frozen=True, slots=True, eq=False)
class Within:
    """What every rank can sum within a time.

    Attributes:
        seconds: the time.
        least, most: share that it has to and can take, ``(world_size,)``. Shares between them
            that add up to 1 exist.
    """

    seconds: float
    least: FloatArray
    most: FloatArray

    def shares(self) -> FloatArray:
        """Return shares that leave every server the same part of its room."""
        most = np.where(np.isinf(self.most), 1.0, self.most)
        room, left = np.maximum(most - self.least, 0.0), 1 - self.least.sum()
        shares = self.least + room * (left / room.sum() if room.any() else 0.0)
        answer: FloatArray = np.maximum(shares, 0.0) / np.maximum(shares, 0.0).sum()
        return answer


def lower_bound_s(aggregation: Aggregation, links: Links) -> float:
    r"""Return the seconds that no shares can beat.

    $$\frac{(C - 1) A^* + P_1^* + P_2^*}{C} + (C + 1) \alpha$$

    with each phase at its own optimum, whatever shares that takes, and at least $A^*$ in place of
    the fraction. With $b = \min(e, g)$ of up and down, or $1 / (1/e + 1/g)$ if half duplex,

    $$A^* = V \max\Big(\frac{1}{\min b_i}, \frac{N (N - 2 + n)}{N \sum_w b + (N - 2) \sum_s b}
    \Big), \quad N \ge 3,$$

    over $N$ workers, $n$ of which serve and are summed in $\sum_w$, and ranks that only serve in
    $\sum_s$. All servers dedicated that is $V \max(1 / \min_w b_i, N / \sum_s b)$; all collocated,
    $V \max(1 / \min b_i, 2 (N - 1) / \sum b)$. A push alone takes at least

    $$P_1^* = V \max\Big(\frac{1}{e_i}\Big|_{i \text{ only works}}, \frac{1}{e_i + r_i},
    \frac{1}{\sum_s r_j}, \max_k \frac{k - 1}{\sum_{j \le k} e_{(j)}}\Big),
    \quad r_i = \frac{g_i}{N - 1} \text{ or } \frac{g_i}{N},$$

    $e_{(j)}$ ascending over workers that serve, and a pull the same with up and down exchanged.
    Pairs count where they bear on a single share: all of them in a phase alone, and those of ranks
    that only serve overlapped. Half duplex counts in $A^*$ alone.

    It is exact where one and the same shares meet all of it: with any number of chunks where
    links are equal, without a limit to them on ranks' own links, behind a barrier where links are
    as fast both ways. With collocated servers on links as fast both ways $A^*$ bounds every
    all-reduce that does not compress, whatever its algorithm.

    Raises:
        ValueError: the links are of other ranks.

    References:
        Derived, and compared with linear programs. Equal links give the shares of BytePS
        (Y. Jiang et al., OSDI 2020), section 4.1.
    """
    check_world("lower_bound_s", aggregation, links)
    chunks, latency_s = aggregation.num_chunks, links.latency_s
    both_s = overlapped(aggregation, links).seconds
    if chunks is None:
        return both_s + 2 * latency_s
    alone_s = sum(alone(aggregation, links, pushes=way).seconds for way in (True, False))
    limit_s = both_s + (max(alone_s, both_s) - both_s) / chunks
    return limit_s + (chunks + 1) * latency_s


def overlapped(aggregation: Aggregation, links: Links) -> Within:
    r"""Return the least time of push and pull at once, and the shares that take no longer.

    A worker carries $1 + (N - 2) w_i$ either way, so $w_i \le (T b_i / V - 1) / (N - 2)$; one
    that only serves $N w_i$. Pairs between workers are left out.
    """
    total, works, serves = aggregation.num_bytes, aggregation.is_worker, aggregation.is_server
    speed = links.bandwidth_bytes_per_s / total
    num_workers, both = aggregation.num_workers, works & serves
    rate = np.minimum(speed / num_workers, np.minimum(*_slowest(aggregation, links)))
    helping = float(rate[serves & ~works].sum())
    own_s = float((1 / speed[works]).max())
    if num_workers == 1 and both.any():
        only = both.astype(np.float64)
        return Within(0.0, only, only)  # what it has is the sum
    seconds = own_s
    if num_workers > 2:
        others = num_workers - 2
        seconds = max(own_s, (1 + both.sum() / others) / (speed[both].sum() / others + helping))
        most = np.where(both, np.maximum(seconds * speed - 1, 0) / others, seconds * rate)
    else:
        if not both.any():
            seconds = max(own_s, 1 / helping)
        most = np.where(both, np.inf, seconds * rate)
    return Within(seconds, np.zeros(len(speed)), np.where(serves, most, 0.0))


def alone(aggregation: Aggregation, links: Links, *, pushes: bool) -> Within:
    r"""Return the least time of a push or a pull, and the shares that take no longer.

    A push takes $T$ or less where $1 - T e_i / V \le w_i \le T r_i / V$ on every rank, the left
    for workers. Such shares exist if no interval is empty, the left ends add up to 1 at most,
    and the right ones to at least that. The sum of left ends is the largest over all subsets, of
    which those with the smallest $e$ count.
    """
    total, works, serves = aggregation.num_bytes, aggregation.is_worker, aggregation.is_server
    into, out_of = _slowest(aggregation, links)
    up, down, pair = links.up_bytes_per_s / total, links.down_bytes_per_s / total, into
    if not pushes:
        up, down, pair = down, up, out_of
    sources = aggregation.num_sources
    rate = np.where(sources > 0, np.minimum(down / np.maximum(sources, 1), pair), np.inf)
    both = works & serves
    slowest = np.sort(up[both])
    seconds = max(
        float((1 / up[works & ~serves]).max(initial=0.0)),
        float((1 / (up + rate)[both]).max(initial=0.0)),
        float(1 / rate[serves].sum()),
        float((np.arange(len(slowest)) / np.cumsum(slowest)).max(initial=0.0)),
    )
    if aggregation.num_workers == 1 and both.any():
        return Within(0.0, both.astype(np.float64), both.astype(np.float64))
    least = np.where(both, np.maximum(1 - seconds * up, 0.0), 0.0)
    return Within(seconds, least, np.where(serves, np.maximum(seconds * rate, least), 0.0))


def _slowest(aggregation: Aggregation, links: Links) -> tuple[FloatArray, FloatArray]:
    """Return the slowest way from any worker to each rank, and back, in shares per second."""
    if links.pair_bytes_per_s is None:
        unlimited = np.full(links.world_size, np.inf)
        return unlimited, unlimited
    pair = links.pair_bytes_per_s / aggregation.num_bytes
    works = aggregation.is_worker
    return pair[works].min(axis=0), pair[:, works].min(axis=1)
