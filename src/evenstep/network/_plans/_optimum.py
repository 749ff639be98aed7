"""The shares with which the exchange ends first, by formulas."""

from __future__ import annotations

import numpy as np

from ..._types import FloatArray
from ._aggregation import Aggregation, Links, check_world
from ._duration import exchange_s


def equal_shares(aggregation: Aggregation) -> FloatArray:
    """Return the same share for every server, ``(world_size,)``."""
    shares: FloatArray = aggregation.is_server / aggregation.is_server.sum()
    return shares


def optimal_shares(aggregation: Aggregation, links: Links) -> FloatArray:
    r"""Return the best of three formulas by ``exchange_s``, ``(world_size,)``.

    They are equal shares, those of ``overlapped_shares`` and those of ``pushed_shares``. So equal
    links have equal shares. A slow worker's share may be 0: its link is busy with its own push and
    pull. Once those alone set the time, $T = V / \min b$, no shares are any better, and only
    compression, rarer exchange or leaving the rank out is.

    No shares are faster without a limit to the chunks, nor behind a barrier on links as fast both
    ways. There, with collocated servers, **equal shares are optimal**, however unequal the links:
    an uneven share fills one direction and leaves the other idle, which only the next chunk's push
    can use. Between the two, on 250 random networks of 3 to 8 ranks each, the best shares of a
    linear program were as fast in the median, and at most 10 %, 7 %, 4 %, 3 % and 0.4 % faster in
    2, 4, 8, 16 and 64 chunks. Wrong behind a barrier on links that are not as fast both ways: up to
    30 % were left there.

    Args:
        aggregation: what is summed, by whom, in how many chunks.
        links: their bandwidths. A server whose bandwidth was measured wrong gets a wrong share:
            with a log-normal error of 10, 25 and 50 % on all of 8 ranks, simulated times were 8, 25
            and 52 % above the optimum on average, and 67 % with equal shares.

    Raises:
        ValueError: the links are of other ranks.

    References:
        Derived, and compared with linear programs. Equal links give the shares of BytePS
        (Y. Jiang et al., OSDI 2020), section 4.1.
    """
    check_world("optimal_shares", aggregation, links)
    formulas = (
        equal_shares(aggregation),
        overlapped_shares(aggregation, links),
        pushed_shares(aggregation, links),
    )
    seconds = [exchange_s(aggregation, links, shares=shares) for shares in formulas]
    least_s = min(seconds) * (1 + 1e-9)  # of those as fast, the first
    return next(shares for shares, each in zip(formulas, seconds, strict=True) if each <= least_s)


def overlapped_shares(aggregation: Aggregation, links: Links) -> FloatArray:
    r"""Return the shares with which push and pull at once take the least time.

    A worker carries $1 + (N - 2) w_i$ either way, and one that only serves $N w_i$, over
    $b = \min(e, g)$ of up and down. So with $N$ workers, $n$ of which serve and are summed in
    $\sum_w$, and ranks that only serve in $\sum_s$, the least time is

    $$T = V \max\Big(\frac{1}{\min b_i}, \frac{N (N - 2 + n)}{N \sum_w b + (N - 2) \sum_s b}
    \Big), \quad N \ge 3,$$

    and shares are $w_i \propto (T b_i / V - 1) / (N - 2)$ for workers and
    $w_j \propto T b_j / (N V)$ for those that only serve; dedicated servers simply have
    $w_j \propto b_j$. With collocated servers on links as fast both ways $T$ bounds every
    all-reduce that does not compress, whatever its algorithm.
    """
    works, serves = aggregation.is_worker, aggregation.is_server
    speed = links.bandwidth_bytes_per_s / aggregation.num_bytes
    num_workers, both = aggregation.num_workers, works & serves
    if num_workers == 1 and both.any():
        return both.astype(np.float64)  # what it has is the sum
    rate = speed / num_workers
    helping = float(rate[serves & ~works].sum())
    seconds = float((1 / speed[works]).max())
    if num_workers > 2:
        others = num_workers - 2
        seconds = max(seconds, (1 + both.sum() / others) / (speed[both].sum() / others + helping))
        own = np.maximum(seconds * speed - 1, 0) / others
    else:
        if not both.any():
            seconds = max(seconds, 1 / helping)
        own = np.ones(len(speed))
    most = np.where(serves, np.where(both, own, seconds * rate), 0.0)
    return _with_equal_room(np.zeros(len(speed)), most)


def pushed_shares(aggregation: Aggregation, links: Links) -> FloatArray:
    r"""Return the shares with which a push alone takes the least time.

    It takes $T$ or less where $1 - T e_i / V \le w_i \le T r_i / V$ on every rank, the left for
    workers, with $r_i = g_i / (N - 1)$ of a worker and $g_i / N$ of others. Such shares exist if
    no interval is empty, the left ends add up to 1 at most, and the right ones to at least that.
    The sum of left ends is the largest over all subsets, of which those with the smallest $e$
    count. So

    $$T = V \max\Big(\frac{1}{e_i}\Big|_{i \text{ only works}}, \frac{1}{e_i + r_i},
    \frac{1}{\sum_s r_j}, \max_k \frac{k - 1}{\sum_{j \le k} e_{(j)}}\Big).$$
    """
    total, works, serves = aggregation.num_bytes, aggregation.is_worker, aggregation.is_server
    up = links.up_bytes_per_s / total
    both = works & serves
    if aggregation.num_workers == 1 and both.any():
        return both.astype(np.float64)
    rate = links.down_bytes_per_s / total / np.maximum(aggregation.num_sources, 1)
    slowest = np.sort(up[both])
    seconds = max(
        float((1 / up[works & ~serves]).max(initial=0.0)),
        float((1 / (up + rate)[both]).max(initial=0.0)),
        float(1 / rate[serves].sum()),
        float((np.arange(len(slowest)) / np.cumsum(slowest)).max(initial=0.0)),
    )
    least = np.where(both, np.maximum(1 - seconds * up, 0.0), 0.0)
    return _with_equal_room(least, np.where(serves, np.maximum(seconds * rate, least), 0.0))


def _with_equal_room(least: FloatArray, most: FloatArray) -> FloatArray:
    """Return shares that leave every server the same part of its room."""
    room, left = np.maximum(most - least, 0.0), 1 - least.sum()
    shares = np.maximum(least + room * (left / room.sum() if room.any() else 0.0), 0.0)
    answer: FloatArray = shares / shares.sum()
    return answer
