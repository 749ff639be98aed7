"""Which transfers show what links carry, before the first step, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from .._types import FloatArray
from ..exceptions import invalid
from ..sharding import Links


@final
@dataclass(frozen=True, slots=True)
class ProbeRound:
    """Transfers that all begin at once.

    Attributes:
        kind: ``"pairs"``, ``"to one"`` or ``"from one"``.
        ways: sender and receiver of each.
        num_bytes: bytes of each.
    """

    kind: str
    ways: tuple[tuple[int, int], ...]
    num_bytes: int


@final
@dataclass(frozen=True, slots=True)
class Probes:
    r"""Bounded tests of links: disjoint pairs, then all to one rank and one rank to all.

    Pairs are met as in a tournament, each once, both directions at once, in $N - 1$ rounds, or
    $N$ of an odd number. A rank's link may carry less than its pairs add up to, and does on most
    machines; so each rank is sent to by all others, and sends to all others, $2 N$ rounds more.

    A shaped link lets a burst through at full speed first, 64 KB and more, and short transfers
    would measure that. So a round is repeated with ``growth`` times the bytes until its fastest
    transfer took ``least_s``, up to ``most_bytes`` a transfer.

    Args:
        least_s: seconds that tell what a link carries.
        first_bytes: bytes of the first transfers.
        most_bytes: most bytes of a transfer, however fast.
        growth: factor between repetitions, above 1.
        most_pairs: most ranks for which pairs are tested too. Among more, ranks' own links are all
            that is asked for.

    Raises:
        ValueError: an argument is out of range.
    """

    least_s: float = 0.25
    first_bytes: int = 2**18
    most_bytes: int = 2**27
    growth: int = 4
    most_pairs: int = 16

    def __post_init__(self) -> None:
        if not (np.isfinite(self.least_s) and self.least_s > 0):
            rule, remedy = "be positive and finite", "Bursts last 10 ms and more: give 0.25."
            raise invalid("Probes(least_s=...)", rule, self.least_s, remedy)
        if not 1 <= self.first_bytes <= self.most_bytes:
            rule, got = f"be in 1 to `most_bytes`, {self.most_bytes}", self.first_bytes
            raise invalid("Probes(first_bytes=...)", rule, got, "Give 262144.")
        if self.growth < 2:
            raise invalid("Probes(growth=...)", "be at least 2", self.growth, "Give 4.")

    def rounds(self, world_size: int) -> tuple[ProbeRound, ...]:
        """Return the rounds in order, each with its first bytes; none for a single rank."""
        if world_size < 2:
            return ()
        rounds = []
        if world_size <= self.most_pairs:
            rounds = [ProbeRound("pairs", ways, self.first_bytes) for ways in pairs(world_size)]
        for one in range(world_size):
            others = [rank for rank in range(world_size) if rank != one]
            to_one = tuple((rank, one) for rank in others)
            from_one = tuple((one, rank) for rank in others)
            rounds.append(ProbeRound("to one", to_one, self.first_bytes))
            rounds.append(ProbeRound("from one", from_one, self.first_bytes))
        return tuple(rounds)

    def again(self, done: ProbeRound, seconds: Sequence[float]) -> ProbeRound | None:
        """Return the round to be made next in place of one that was too short; None if it was not.

        Args:
            done: the round.
            seconds: what each of its transfers took, in the order of ``done.ways``.
        """
        if min(seconds) >= self.least_s or done.num_bytes >= self.most_bytes:
            return None
        return ProbeRound(done.kind, done.ways, min(done.num_bytes * self.growth, self.most_bytes))


def pairs(world_size: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield rounds of disjoint pairs, both directions of each, until all have met once.

    The circle method: all but the last seat move on by one; with an odd number one rank rests.
    """
    seats = list(range(world_size)) + [-1] * (world_size % 2)
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        met = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield tuple(way for a, b in met if min(a, b) >= 0 for way in ((a, b), (b, a)))
        seats = [seats[-2], *seats[:-2], seats[-1]]


def links_from_probes(
    world_size: int,
    rounds: Sequence[tuple[ProbeRound, Sequence[float]]],
    *,
    latency_s: float = 0.0,
    slow_pair: float = 0.7,
) -> Links:
    r"""Return what probed links carry.

    Of a rank's link it is known what all transfers to it had moved when each of them ended:
    $\max_t \frac{1}{t} \sum_{s_k \le t} v_k$ of transfers of $v_k$ bytes that took $s_k$, and as
    much as its fastest pair. Nothing else is taken from pairs, unless one is below ``slow_pair``
    times what both of its ranks' links carry: then something in between is slower, and it counts
    as a pair. Others are left to the ranks' own links.

    Args:
        world_size: number of ranks, at least 2.
        rounds: the last repetition of each round, and what each of its transfers took.
        latency_s: of an empty message, if known.
        slow_pair: part of both links below which a pair counts by itself, in (0, 1).

    Raises:
        ValueError: a rank was not probed in either direction, or a time is not positive.
    """
    pair = np.zeros((world_size, world_size))
    up, down = np.zeros(world_size), np.zeros(world_size)
    for done, seconds in rounds:
        taken = np.asarray(seconds, np.float64)
        if taken.shape != (len(done.ways),) or not (np.isfinite(taken) & (taken > 0)).all():
            rule = f"give {len(done.ways)} positive times for each round"
            raise invalid("links_from_probes(rounds=...)", rule, seconds, "Probe again.")
        one_sender, one_receiver = done.ways[0]
        if done.kind == "pairs":
            for (sender, receiver), taken_s in zip(done.ways, taken, strict=True):
                pair[sender, receiver] = done.num_bytes / taken_s
        elif done.kind == "to one":
            down[one_receiver] = max(down[one_receiver], _carried(done.num_bytes, taken))
        else:
            up[one_sender] = max(up[one_sender], _carried(done.num_bytes, taken))
    up, down = np.maximum(up, pair.max(axis=1)), np.maximum(down, pair.max(axis=0))
    if not (up.all() and down.all()):
        rank = int(np.argmin(np.minimum(up, down)))
        rule, remedy = "probe every rank both ways", "Make all of `Probes.rounds`."
        raise invalid("links_from_probes(rounds=...)", rule, f"nothing of rank {rank}", remedy)
    slow = (pair > 0) & (pair < slow_pair * np.minimum(up[:, None], down[None, :]))
    np.fill_diagonal(slow, False)
    limits = np.where(slow, pair, np.inf) if slow.any() else None
    return Links(up, down, pair_bytes_per_s=limits, latency_s=latency_s)


def _carried(num_bytes: int, seconds: FloatArray) -> float:
    """Return the most bytes per second that transfers of the same size are known to have had."""
    ended = np.sort(seconds)
    return float((num_bytes * np.arange(1, len(ended) + 1) / ended).max())
