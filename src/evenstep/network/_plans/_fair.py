"""How long transfers take that all begin at once, if ranks' links are shared fairly."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..._types import FloatArray, IntArray
from ...exceptions import invalid
from ._aggregation import BoolArray
from ._bandwidths import Links

# Transfers that end within this part of the time so far end together: a mesh of 16 ranks has 240.
TOGETHER = 0.02
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class FairTransfers:
    """What transfers that share links take, and how much of the links they use.

    Attributes:
        seconds: until each transfer from one rank (row) to another (column) is through, from the
            common beginning on, 0 where nothing is sent, ``(world_size, world_size)``.
        up_bytes_per_s: the most that each rank sent at any time, ``(world_size,)``: what its link
            carries if it ever was the limit.
        down_bytes_per_s: likewise what it got.
    """

    seconds: FloatArray
    up_bytes_per_s: FloatArray
    down_bytes_per_s: FloatArray


def fair_transfers(num_bytes: FloatArray, links: Links) -> FairTransfers:
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

    Raises:
        ValueError: the bytes are of other ranks, negative or not finite.

    References:
        D. Bertsekas and R. Gallager, *Data Networks*, 1992, section 6.5.2.
    """
    left = np.array(num_bytes, np.float64)
    shape = (links.world_size, links.world_size)
    if left.shape != shape or not (np.isfinite(left) & (left >= 0)).all():
        rule, got = f"be {shape} numbers of at least 0", num_bytes
        raise invalid("fair_transfers(num_bytes=...)", rule, got, "Give 0 where nothing is sent.")
    np.fill_diagonal(left, 0.0)
    seconds, now_s = np.zeros(shape), 0.0
    most_up, most_down = np.zeros(len(left)), np.zeros(len(left))
    active = left > 0
    while active.any():
        rates = fair_rates(active, links)
        np.maximum(most_up, rates.sum(axis=1), out=most_up)
        np.maximum(most_down, rates.sum(axis=0), out=most_down)
        needs_s = np.divide(left, rates, out=np.full(shape, np.inf), where=active)
        until_s = float(needs_s.min())
        until_s += TOGETHER * (now_s + until_s)
        done = active & (needs_s <= until_s)
        seconds[done] = now_s + needs_s[done]
        left = np.where(done, 0.0, left - rates * until_s)
        active &= ~done
        now_s += until_s
    return FairTransfers(seconds, most_up, most_down)


def fair_rates(active: BoolArray, links: Links) -> FloatArray:
    """Return the max-min fair rates of the ``active`` transfers, ``(world_size, world_size)``.

    Water filling: an end that offers each of its open transfers no more than all their other
    ends do is full, and fixes them. The end that offers least of all is one, so it goes on.
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
