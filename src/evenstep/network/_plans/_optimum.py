"""The shares with which the exchange ends first.

A bound proves a formula's shares where it can. A linear program has the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..._install import install_line
from ..._types import FloatArray
from ._aggregation import Aggregation, Links, check_world
from ._duration import Rows, exchange_s, phases_of


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

    References:
        Derived, and compared with linear programs. Equal links give the shares of BytePS
        (Y. Jiang et al., OSDI 2020), section 4.1.
    """
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


def solve_shares(aggregation: Aggregation, links: Links) -> FloatArray:
    r"""Return shares of the least ``exchange_s``, whatever the links and the chunks.

    $\min (C - 1) A + P_1 + P_2$ with every link's line in $w$ below its phase, $w \ge 0$,
    $\sum w = 1$. Without a limit to the chunks it is $\min A$, behind a barrier
    $\min P_1 + P_2$. Pairs need a row each: 128 ranks take 0.2 s or so.

    Optima tie. Where only ranks' own links limit, those returned leave every server the same part
    of its room, so they do not depend on the numbering; with pairs they are what the solver found.

    Raises:
        ImportError: scipy is not there.

    References:
        Q. Huangfu and J. Hall, *Parallelizing the dual revised simplex method* (HiGHS), 2018.
        hivemind's ``load_balancing.py`` solves the overlapped case so.
    """
    optimize, sparse = _scipy()
    size, chunks = links.world_size, aggregation.num_chunks
    weights = [0.0, 0.0, 1.0] if chunks is None else [1.0, 1.0, chunks - 1.0]
    phases = zip(phases_of(aggregation, links), weights, strict=True)
    rows, used = zip(*((each, weight) for each, weight in phases if weight > 0), strict=True)
    # The solver's tolerances are absolute: times of about 1, however slow an unneeded link.
    unit_s = overlapped(aggregation, links).seconds or float(rows[0].constant_s.max())
    answer = optimize.linprog(
        [0.0] * size + [*used],
        A_ub=sparse.vstack(
            [_matrix(sparse, each, size, len(used), i, unit_s) for i, each in enumerate(rows)],
            format="csr",
        ),
        b_ub=-np.concatenate([each.constant_s for each in rows]) / unit_s,
        A_eq=np.concatenate([aggregation.is_server, np.zeros(len(used))])[None],
        b_eq=[1.0],
        bounds=[(0, 1 if serves else 0) for serves in aggregation.is_server]
        + [(0, None)] * len(used),
        method="highs",
    )
    if not answer.success:  # bounded and feasible by construction
        raise RuntimeError(f"HiGHS found no shares: {answer.message}")
    shares = np.where(aggregation.is_server, np.maximum(answer.x[:size], 0.0), 0.0)
    found: FloatArray = shares / shares.sum()
    return found if links.pair_bytes_per_s is not None else _centred(aggregation, rows, found)


def _matrix(sparse: Any, rows: Rows, size: int, num_phases: int, phase: int, unit_s: float) -> Any:
    """Return the rows as a sparse matrix over shares and phases, ``- unit_s`` below its phase."""
    each = np.arange(len(rows.first))
    entries = np.concatenate([rows.first_s, rows.second_s]) / unit_s
    where = (np.concatenate([each, each]), np.concatenate([rows.first, rows.second]))
    shape = (len(each), size + num_phases)
    time = (np.full(len(each), -1.0), (each, np.full(len(each), size + phase)))
    return sparse.coo_array((entries, where), shape) + sparse.coo_array(time, shape)


def _centred(aggregation: Aggregation, phases: Sequence[Rows], shares: FloatArray) -> FloatArray:
    """Return the shares that take no longer in any phase, with equal parts of the room."""
    least, most = np.zeros(len(shares)), aggregation.is_server.astype(np.float64)
    for rows in phases:
        spare = rows.seconds(shares) - rows.constant_s
        slope = rows.first_s
        edge = np.divide(spare, slope, out=np.zeros_like(spare), where=slope != 0)
        np.minimum.at(most, rows.first[slope > 0], edge[slope > 0])
        np.maximum.at(least, rows.first[slope < 0], edge[slope < 0])
    return Within(0.0, least, np.maximum(most, least)).shares()


def _scipy() -> tuple[Any, Any]:
    try:
        from scipy import optimize, sparse  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        message = (
            "Shares for these links and chunks have no closed form, and solving for them needs "
            f"scipy: `{install_line('network')}`."
        )
        raise ImportError(message) from error
    return optimize, sparse


# What counts as no slower: than the bound, which is exact up to rounding, and than the program's
# answer, which the solver finds to 1e-7 or so.
NEAR, SOLVED = 1 + 1e-9, 1 + 1e-6


def equal_shares(aggregation: Aggregation) -> FloatArray:
    """Return the same share for every server, ``(world_size,)``."""
    shares: FloatArray = aggregation.is_server / aggregation.is_server.sum()
    return shares


def optimal_shares(aggregation: Aggregation, links: Links) -> FloatArray:
    r"""Return shares of the least ``exchange_s``, ``(world_size,)``.

    Equal shares, the closed forms of an overlapped exchange and of a push alone are tried in this
    order. Whose time is that of ``lower_bound_s`` is optimal; if none is, a linear program is
    solved, and the first as good as its answer is returned. So equal links have equal shares,
    and scipy is needed only where the bound does not settle it: for two or more chunks on unequal
    links, behind a barrier on links that are not as fast both ways, and for pairs of workers that
    are slower than their ranks' links. Links as they are measured are always among these:
    ``formula_shares`` does without scipy.

    Overlapped without end, with $T = A^*$ of ``lower_bound_s``, shares are

    $$w_i \propto \frac{T b_i / V - 1}{N - 2} \text{ for workers}, \quad
    w_j \propto \frac{T b_j}{N V} \text{ for those that only serve},$$

    and dedicated servers simply have $w_j \propto b_j$. A slow worker's share may be 0: its link
    is busy with its own push and pull. Once those alone set the time, $T = V / \min b$, no shares
    are any better, and only compression, rarer exchange or leaving the rank out is.

    Behind a barrier, collocated on links as fast both ways, **equal shares are optimal**, however
    unequal the links: an uneven share fills one direction and leaves the other idle, which only
    the next chunk's push can use.

    Args:
        aggregation: what is summed, by whom, in how many chunks.
        links: their bandwidths. A server whose bandwidth was measured wrong gets a wrong share:
            with a log-normal error of 10, 25 and 50 % on all of 8 ranks, simulated times were 8, 25
            and 52 % above the optimum on average, and 67 % with equal shares.

    Raises:
        ImportError: a linear program is needed and scipy is not there.
        ValueError: the links are of other ranks.

    References:
        Derived. The bound that proves an answer, and trying formulas against it, are ours.
    """
    check_world("optimal_shares", aggregation, links)
    simple = _formulas(aggregation, links)
    seconds = [exchange_s(aggregation, links, shares=shares) for shares in simple]
    limit_s = lower_bound_s(aggregation, links) * NEAR
    if min(seconds) > limit_s:
        solved = solve_shares(aggregation, links)
        simple, seconds = (
            (*simple, solved),
            [*seconds, exchange_s(aggregation, links, shares=solved)],
        )
        limit_s = seconds[-1] * SOLVED
    return next(shares for shares, took_s in zip(simple, seconds, strict=True) if took_s <= limit_s)


def formula_shares(aggregation: Aggregation, links: Links) -> FloatArray:
    """Return the best shares that have a formula, ``(world_size,)``: without a linear program.

    On 2880 random networks of 3 to 8 ranks they took 0 to 0.3 % longer than the best in the median,
    and 9 %, 7 %, 2 % and 0.4 % at most, with 2, 4, 16 and 64 chunks.
    """
    simple = _formulas(aggregation, links)
    return min(simple, key=lambda shares: exchange_s(aggregation, links, shares=shares))


def _formulas(aggregation: Aggregation, links: Links) -> tuple[FloatArray, ...]:
    return (
        equal_shares(aggregation),
        overlapped(aggregation, links).shares(),
        alone(aggregation, links, pushes=True).shares(),
    )
