"""What rounds of probes took, and what follows from them of links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

import numpy as np
from numpy.typing import NDArray

from ..._types import FloatArray
from ...exceptions import invalid
from .._plans._bandwidths import Links

Way = tuple[int, int]
Kind = Literal["pairs", "one"]
FASTER = 1.2  # times what a rank's link carried: a partner's that surely was not the limit


@final
@dataclass(frozen=True, slots=True)
class ProbeRound:
    """Transfers that all begin at once.

    Attributes:
        kind: ``"pairs"``, disjoint ones, or ``"one"``, all others to one rank and it to them.
        ways: sender and receiver of each.
        num_bytes: bytes of each, in the same order.
    """

    kind: Kind
    ways: tuple[Way, ...]
    num_bytes: tuple[int, ...]

    @property
    def groups(self) -> tuple[slice, ...]:
        """What counts together: each way of pairs; all ways to the one rank, and all from it."""
        size = len(self.ways)
        width = 1 if self.kind == "pairs" else size // 2
        return tuple(slice(at, at + width) for at in range(0, size, width))


@final
@dataclass(frozen=True, slots=True)
class Probed:
    """A round as it was made.

    Attributes:
        made: the round.
        seconds: what each of its transfers took, in the order of its ways.

    Raises:
        ValueError: there are not as many times as ways, or one is not positive.
    """

    made: ProbeRound
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        taken = np.asarray(self.seconds, np.float64)
        if taken.shape != (len(self.made.ways),) or not (np.isfinite(taken) & (taken > 0)).all():
            rule = f"be {len(self.made.ways)} positive times"
            raise invalid("Probed(seconds=...)", rule, self.seconds, "Probe again.")


def parts(done: Sequence[Probed]) -> dict[tuple[Way, ...], Probed]:
    """Return the last repetition of every pair's way and of every rank with all others, by ways."""
    found: dict[tuple[Way, ...], Probed] = {}
    for each in done:
        if each.made.kind == "one":
            found[each.made.ways] = each
            continue
        for way, size, taken_s in zip(
            each.made.ways, each.made.num_bytes, each.seconds, strict=True
        ):
            found[way,] = Probed(ProbeRound("pairs", (way,), (size,)), (taken_s,))
    return found


def links_from_probes(
    world_size: int,
    done: Sequence[Probed],
    *,
    latency_s: float = 0.0,
    slow_pair: float = 0.7,
) -> Links | None:
    r"""Return what probed links carry; None where that is not known of every rank.

    Of a rank's link it is known what all transfers to it had moved when each of them ended:
    $\max_t \frac{1}{t} \sum_{s_k \le t} v_k$ of transfers of $v_k$ bytes that took $s_k$; the most
    of all rounds counts. Pairs alone tell it of a rank that met all others, if one of them is
    faster. Nothing else is taken from pairs, unless one is below ``slow_pair``
    times what both of its ranks' links carry: then something in between is slower, and it counts
    as a pair. Others are left to the ranks' own links.

    Args:
        world_size: number of ranks, at least 2.
        done: all rounds, as they were made; of repetitions the last counts.
        latency_s: of an empty message, if known.
        slow_pair: part of both links below which a pair counts by itself, in (0, 1).
    """
    if not known_ranks(world_size, done).all():
        return None
    up, down = seen_rates(world_size, done)
    pair = _pair_rates(world_size, done)
    slow = (pair > 0) & (pair < slow_pair * np.minimum(up[:, None], down[None, :]))
    limits = np.where(slow, pair, np.inf) if slow.any() else None
    return Links(up, down, pair_bytes_per_s=limits, latency_s=latency_s)


def known_ranks(world_size: int, done: Sequence[Probed]) -> NDArray[np.bool_]:
    """Return of whom rounds show what both directions of its link carry, ``(world_size,)``.

    Of who exchanged with all others at once, and of who met all of them, one of which has a faster
    link. Of two ranks, nothing but their pair is ever of interest.
    """
    up, down = seen_rates(world_size, done)
    num_met = (_pair_rates(world_size, done) > 0).sum(axis=1)
    told: NDArray[np.bool_] = num_met == world_size - 1
    if world_size == 2:
        return told
    others = ~np.eye(world_size, dtype=np.bool_)
    told &= (others & (down[None, :] > FASTER * up[:, None])).any(axis=1)
    told &= (others & (up[None, :] > FASTER * down[:, None])).any(axis=1)
    for each in parts(done).values():
        if each.made.kind == "one":
            told[each.made.ways[0][1]] = True
    return told


def seen_rates(world_size: int, done: Sequence[Probed]) -> tuple[FloatArray, FloatArray]:
    """Return the most that each rank's link was seen to carry, up and down; 0 where unknown."""
    seen = np.zeros((2, world_size))
    for each in parts(done).values():
        num_bytes, seconds = np.array(each.made.num_bytes), np.array(each.seconds)
        for group in each.made.groups:
            carried = _carried(num_bytes[group], seconds[group])
            senders, receivers = zip(*each.made.ways[group], strict=True)
            for direction, ranks in enumerate((senders, receivers)):
                if len(set(ranks)) == 1:  # of the others, too little went over their links
                    seen[direction, ranks[0]] = max(seen[direction, ranks[0]], carried)
    return seen[0], seen[1]


def _pair_rates(world_size: int, done: Sequence[Probed]) -> FloatArray:
    """Return the rate of each pair that met, by sender and receiver; 0 of others."""
    rates = np.zeros((world_size, world_size))
    for each in parts(done).values():
        if each.made.kind == "pairs":
            rates[each.made.ways[0]] = each.made.num_bytes[0] / each.seconds[0]
    return rates


def _carried(num_bytes: NDArray[np.int64], seconds: FloatArray) -> float:
    """Return the most bytes per second that transfers together are known to have had."""
    order = np.argsort(seconds)
    return float((np.cumsum(num_bytes[order]) / seconds[order]).max())
