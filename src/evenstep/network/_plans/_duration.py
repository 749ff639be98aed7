"""How long gradients take over given links.

Plain all-reduce takes what a ring does; shares take what their push and pull do, by formula; and
transfers that all begin at once take what fair links give them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..._types import FloatArray, IntArray
from ...exceptions import invalid
from ._aggregation import Aggregation, BoolArray, Links, check_world


def ring_s(aggregation: Aggregation, links: Links) -> float:
    r"""Return the seconds of a ring all-reduce among the workers, in the order of their ranks.

    $2 \frac{N - 1}{N} \frac{V}{\text{slowest link}} + 2 (N - 1) \alpha$: each worker sends that
    much to the next, so the order matters only where pairs differ. Half duplex, a worker sends
    and receives in turn.

    It is what a ring costs that is pipelined without gaps; gloo's all-reduce was measured to take
    1.1 to 1.3 times that on shaped links. Libraries pick trees and other algorithms too.

    Args:
        aggregation: the bytes and the workers. Ranks that only serve are left out.
        links: their bandwidths.

    References:
        P. Patarasuk and X. Yuan, *Bandwidth optimal all-reduce algorithms for clusters of
        workstations*, 2009.
    """
    ring = np.flatnonzero(aggregation.is_worker)
    if len(ring) == 1:
        return 0.0
    after = np.roll(ring, -1)
    hops = np.minimum(links.up_bytes_per_s[ring], links.down_bytes_per_s[after])
    if links.pair_bytes_per_s is not None:
        hops = np.minimum(hops, links.pair_bytes_per_s[ring, after])
    slowest = min(float(hops.min()), float(links.bandwidth_bytes_per_s[ring].min()))
    rounds = 2 * (len(ring) - 1)
    return rounds / len(ring) * aggregation.num_bytes / slowest + rounds * links.latency_s


# Transfers that end within this part of the time so far end together: a mesh of 16 ranks has 240.
TOGETHER = 0.02
ROUNDING = 1e-9


def fair_transfers(num_bytes: FloatArray, links: Links) -> tuple[FloatArray, FloatArray]:
    r"""Return how long transfers take that all begin at once, under max-min fair sharing.

    At any time every transfer runs as fast as it can without slowing down one that is no faster:
    each is limited by its pair, or by an end whose link is full and on which none is faster. That
    is what many TCP connections come to in the mean. When one ends, the others take over its part.

    A reference for the closed forms, which ask only for how long every link is busy, and the
    model behind the tracking of links. Left out: latency, and half duplex, which is
    taken for full.

    Args:
        num_bytes: from one rank (row) to another (column), at least 0; the diagonal is ignored,
            ``(world_size, world_size)``.
        links: what they share.

    Returns:
        Seconds until each transfer is through, from the common beginning on, 0 where nothing is
        sent, ``(world_size, world_size)``; and the most that each rank sent and got at any time, in
        bytes per second, ``(2, world_size)``: what its link carries if it ever was the limit.

    References:
        D. Bertsekas and R. Gallager, *Data Networks*, 1992, section 6.5.2.
    """
    left = np.array(num_bytes, np.float64)
    np.fill_diagonal(left, 0.0)
    seconds, now_s = np.zeros(left.shape), 0.0
    most = np.zeros((2, len(left)))
    active = left > 0
    while active.any():
        rates = fair_rates(active, links)
        np.maximum(most, [rates.sum(axis=1), rates.sum(axis=0)], out=most)
        needs_s = np.divide(left, rates, out=np.full(left.shape, np.inf), where=active)
        until_s = float(needs_s.min())
        until_s += TOGETHER * (now_s + until_s)
        done = active & (needs_s <= until_s)
        seconds[done] = now_s + needs_s[done]
        left = np.where(done, 0.0, left - rates * until_s)
        active &= ~done
        now_s += until_s
    return seconds, most


def fair_rates(active: BoolArray, links: Links) -> FloatArray:
    """Return the max-min fair rates of the ``active`` transfers, ``(world_size, world_size)``.

    Water filling: an end that offers each of its open transfers no more than all their other
    ends do is full, and fixes them. The end that offers least of all is one, so filling continues.
    """
    rates = np.zeros(active.shape)
    pair = np.inf if links.pair_bytes_per_s is None else links.pair_bytes_per_s
    up, down = links.up_bytes_per_s, links.down_bytes_per_s
    crumb_up, crumb_down = ROUNDING * up, ROUNDING * down
    unset = active.copy()
    while unset.any():
        offers_up = _offers(up, unset.sum(axis=1))[:, None]
        offers_down = _offers(down, unset.sum(axis=0))[None, :]
        level = np.where(unset, np.minimum(np.minimum(offers_up, offers_down), pair), np.inf)
        enough = level * (1 + ROUNDING)
        full_up = (offers_up <= enough).all(axis=1, keepdims=True)
        full_down = (offers_down <= enough).all(axis=0, keepdims=True)
        fixed = unset & (full_up | full_down | (pair <= enough))
        rates[fixed] = level[fixed]
        given = np.where(fixed, level, 0.0)
        up = np.maximum(up - given.sum(axis=1), crumb_up)
        down = np.maximum(down - given.sum(axis=0), crumb_down)
        unset &= ~fixed
    return rates


def _offers(capacity: FloatArray, number: IntArray) -> FloatArray:
    """Return what each end has for each of its transfers, infinite where it has none."""
    offers: FloatArray = np.where(number > 0, capacity / np.maximum(number, 1), np.inf)
    return offers


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    r"""Seconds of one phase on every link, each a line in at most two shares.

    $\max_k (c_k + p_k w_{i_k} + q_k w_{j_k})$. Evaluated here, and the rows of the linear program.

    Attributes:
        constant_s: $c$, ``(num_rows,)``.
        first, second: $i$ and $j$, ranks, ``(num_rows,)``.
        first_s, second_s: $p$ and $q$, ``(num_rows,)``.
    """

    constant_s: FloatArray
    first: IntArray
    first_s: FloatArray
    second: IntArray
    second_s: FloatArray

    def seconds(self, shares: FloatArray) -> float:
        """Return the time of the slowest link."""
        each = self.constant_s + self.first_s * shares[self.first]
        return float((each + self.second_s * shares[self.second]).max())


def exchange_s(aggregation: Aggregation, links: Links, *, shares: FloatArray) -> float:
    r"""Return the seconds that one step's push and pull take.

    $T_C = \frac{(C - 1) A + P_1 + P_2}{C} + (C + 1) \alpha$, with $P_1$ and $P_2$ what push
    and pull take alone, $A$ what they take at once, and $\alpha$ the latency:

    $$P_1 = V \max_i \max\Big(\frac{1 - w_i}{e_i}, \frac{(N - 1) w_i}{g_i}\Big), \quad
    P_2 = V \max_i \max\Big(\frac{1 - w_i}{g_i}, \frac{(N - 1) w_i}{e_i}\Big), \quad
    A = V \max_i \frac{1 + (N - 2) w_i}{\min(e_i, g_i)},$$

    for workers that serve too, with $e$ up and $g$ down. A rank that only serves carries
    $N w_i$ and nothing of its own; one that only works, 1. Half duplex adds up what goes either
    way. Between a pair, a push carries $w_j$ from $i$ to $j$ and a pull $w_i$. Without a limit to
    the chunks it is $A + 2 \alpha$.

    Right for chunks in lock-step on links that carry what was measured, whichever ranks send at
    the same time. Left out: headers (4 to 5 % on Ethernet), many senders that overrun one receiver,
    the sums themselves, and what the backward hides.

    Args:
        aggregation: what is summed and by whom.
        links: their bandwidths.
        shares: $w$, the part of the bytes that each rank sums, at least 0, adding up to 1, 0
            where a rank is no server, ``(world_size,)``.

    Raises:
        ValueError: the links or the shares are of other ranks, or the shares no shares.

    References:
        Derived; with one chunk the usual cost of a sharded parameter server, as in
        Y. Jiang et al., *A unified architecture for accelerating distributed DNN training*
        (BytePS), OSDI 2020.
    """
    check_world("exchange_s", aggregation, links)
    check_shares("exchange_s", aggregation, shares)
    push_s, pull_s, both_s = (rows.seconds(shares) for rows in phases_of(aggregation, links))
    chunks = aggregation.num_chunks
    if chunks is None:
        return both_s + 2 * links.latency_s
    return both_s + (push_s + pull_s - both_s) / chunks + (chunks + 1) * links.latency_s


def phases_of(aggregation: Aggregation, links: Links) -> tuple[Rows, Rows, Rows]:
    """Return what the first push, the last pull, and both at once in between cost on every link."""
    works = aggregation.is_worker.astype(np.float64)
    up_s = aggregation.num_bytes / links.up_bytes_per_s
    down_s = aggregation.num_bytes / links.down_bytes_per_s
    # What a rank sends as a worker, and gets as a server, each a constant and a slope per rank; the
    # pull turns both round.
    sources = aggregation.num_sources.astype(np.float64)
    gives, takes = np.stack([works, -works]), np.stack([0 * works, sources])
    either = np.stack([works, sources - works])
    if links.half_duplex:
        push, pull = [gives * up_s + takes * down_s], [gives * down_s + takes * up_s]
        both = [either * (up_s + down_s)]
    else:
        push, pull = [gives * up_s, takes * down_s], [gives * down_s, takes * up_s]
        both = [either * np.maximum(up_s, down_s)]
    return (
        _rows(aggregation, links, push, pushes=True, pulls=False),
        _rows(aggregation, links, pull, pushes=False, pulls=True),
        _rows(aggregation, links, both, pushes=True, pulls=True),
    )


def _rows(
    aggregation: Aggregation, links: Links, lines: list[FloatArray], *, pushes: bool, pulls: bool
) -> Rows:
    """Return the lines of ranks, then those of pairs where there are any."""
    ranks = np.tile(np.arange(links.world_size), len(lines))
    constant, slope = np.concatenate(lines, axis=1)
    nothing = np.zeros(len(ranks))
    if links.pair_bytes_per_s is None:
        return Rows(constant, ranks, slope, ranks, nothing)
    source, target = np.nonzero(np.isfinite(links.pair_bytes_per_s))
    seconds = aggregation.num_bytes / links.pair_bytes_per_s[source, target]
    return Rows(
        np.concatenate([constant, np.zeros(len(source))]),
        np.concatenate([ranks, source]),
        np.concatenate([slope, seconds * aggregation.is_worker[target] * pulls]),
        np.concatenate([ranks, target]),
        np.concatenate([nothing, seconds * aggregation.is_worker[source] * pushes]),
    )


def check_shares(function: str, aggregation: Aggregation, shares: FloatArray) -> None:
    """Raise unless these are shares of ranks that may have them."""
    given = np.asarray(shares)
    argument = f"{function}(shares=...)"
    if given.shape != (aggregation.world_size,):
        rule = f"have shape ({aggregation.world_size},)"
        raise invalid(argument, rule, given.shape, "Give one share per rank.")
    if not (given >= 0).all() or abs(given.sum() - 1) > 1e-6:
        rule = "be at least 0 and add up to 1"
        raise invalid(argument, rule, given, "Divide them by their sum.")
    if given[~aggregation.is_server].any():
        rank = int(np.argmax(np.where(aggregation.is_server, 0, given)))
        rule, got = "be 0 where a rank is no server", f"{given[rank]} on rank {rank}"
        raise invalid(argument, rule, got, "Set `is_server` there, or share among the others.")
