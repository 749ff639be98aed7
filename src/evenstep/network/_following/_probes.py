"""Which transfers show what links carry, before the first step, and when it is enough."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import final

import numpy as np

from ..._types import FloatArray
from ...exceptions import invalid
from ._probed import Kind, Probed, ProbeRound, Way, known_ranks, parts, seen_rates

AIM = 1.5  # of the least time: how long a round should last, so that noise does not cut it short
Sized = tuple[ProbeRound, float]  # and the seconds that it should last


@final
@dataclass(frozen=True, slots=True)
class Probes:
    r"""Bounded tests of links: disjoint pairs, then one rank with all others.

    Pairs are met as in a tournament, each once, both directions at once, in $N - 1$ rounds, or
    $N$ of an odd number. They tell what every link carries that is slower than another one. A rank
    that no other was faster than may have a faster link than its partners could show, or one that
    carries less than its pairs add up to: it exchanges with all others at once, both ways. So do
    the others afterwards, as each of their pairs may have been limited by something in between.

    A shaped link lets a burst through at full speed first, 64 KB and more, and short transfers
    would measure that. So what was too short of a round is repeated, with up to ``growth`` times
    the bytes, until it took ``least_s`` and ``least_bytes`` went over each of its links. Later
    rounds begin with what suffices by what is known.

    No round begins if it is not expected to end within ``budget_s``, and none at all any more if
    those that are needed are not: then the links stay unknown, and training learns them. The first
    transfers, of which nothing is known, may take longer: over links of less than 200 kbit/s.

    Args:
        budget_s: seconds that all of it may take.
        least_s: seconds that tell what a link carries.
        least_bytes: bytes that tell what a link carries; several times what passes at once.
        first_bytes: bytes of the first transfers.
        most_bytes: most bytes of a transfer, however fast.
        growth: most factor between repetitions, above 1.
        most_pairs: most ranks for which pairs are tested. Among more, each exchanges with all
            others, and no slow pair is found.

    Raises:
        ValueError: an argument is out of range.
    """

    budget_s: float = 3.0
    least_s: float = 0.1
    least_bytes: int = 2**19
    first_bytes: int = 2**16
    most_bytes: int = 2**24
    growth: int = 4
    most_pairs: int = 10

    def __post_init__(self) -> None:
        for name, remedy in (("budget_s", "3 s are enough for some ranks."), ("least_s", "0.1")):
            if not (np.isfinite(value := getattr(self, name)) and value > 0):
                raise invalid(f"Probes({name}=...)", "be positive and finite", value, remedy)
        if not 1 <= self.first_bytes <= self.most_bytes:
            rule, got = f"be in 1 to `most_bytes`, {self.most_bytes}", self.first_bytes
            raise invalid("Probes(first_bytes=...)", rule, got, "Give 65536.")
        if self.growth < 2:
            raise invalid("Probes(growth=...)", "be at least 2", self.growth, "Give 4.")

    def next(self, world_size: int, done: Sequence[Probed], elapsed_s: float) -> ProbeRound | None:
        """Return the most telling round to be made next; None if it is enough, or time is up.

        Args:
            world_size: number of ranks.
            done: all rounds so far, repetitions included, as they were made.
            elapsed_s: since the first began, the same on all ranks.
        """
        if world_size < 2:
            return None
        whole = self.whole(done)
        made = parts(whole)
        left = [ways for ways in self._pairs(world_size) if any((way,) not in made for way in ways)]
        kind: Kind = "pairs" if left else "one"
        num_needed = len(left)
        if not left and world_size > 2:
            left, num_needed = self._stars(world_size, whole)
        chosen = self._again(done[-1]) if done else None
        if chosen is None and left:
            chosen = self._first(world_size, kind, left[0], whole)
        if chosen is None:
            return None
        lasts_s = chosen[1] + max(num_needed - 1, 0) * self._aim_s
        return chosen[0] if elapsed_s + lasts_s <= self.budget_s else None

    def whole(self, done: Sequence[Probed]) -> list[Probed]:
        """Return what of the rounds lasted long enough to be believed."""
        return [each for each in parts(done).values() if not self._is_short(each)]

    def _pairs(self, world_size: int) -> tuple[tuple[Way, ...], ...]:
        return tuple(pairs(world_size)) if world_size <= self.most_pairs else ()

    def _stars(self, world_size: int, done: Sequence[Probed]) -> tuple[list[tuple[Way, ...]], int]:
        """Return the rounds of one with all others, unknown ranks first, and how many those are."""
        made, known = parts(done), known_ranks(world_size, done)
        ones = [rank for rank in range(world_size) if star(world_size, rank) not in made]
        ones.sort(key=lambda rank: bool(known[rank]))
        return [star(world_size, one) for one in ones], sum(not known[one] for one in ones)

    def _first(
        self, world_size: int, kind: Kind, ways: tuple[Way, ...], done: Sequence[Probed]
    ) -> Sized:
        """Return a round that should last long enough, by what its ranks' links carried so far.

        The one rank sends to all others what suits them, at the rate that it had alone.
        """
        up, down = (_filled(each) for each in seen_rates(world_size, done))
        rates = [float(min(up[sender], down[receiver])) for sender, receiver in ways]
        first = ProbeRound(kind, ways, (self.first_bytes,) * len(ways))
        if not all(rates):
            return first, self._aim_s
        if kind == "one":
            half = len(ways) // 2
            one = ways[half][0]
            for group, own in zip(first.groups, (down[one], up[one]), strict=True):
                others = sum(rates[group])
                rates[group] = [rate * min(own / others, 1.0) for rate in rates[group]]
        return self._sized(first, rates, self.most_bytes)

    def _again(self, last: Probed) -> Sized | None:
        """Return what of a round is to be made once more, as it was too short; None if nothing."""
        short = [each for each in parts([last]).values() if self._is_short(each)]
        if not short:
            return None
        ways = tuple(way for each in short for way in each.made.ways)
        num_bytes = tuple(size for each in short for size in each.made.num_bytes)
        seconds = [taken_s for each in short for taken_s in each.seconds]
        rates = [size / taken_s for size, taken_s in zip(num_bytes, seconds, strict=True)]
        return self._sized(ProbeRound(last.made.kind, ways, num_bytes), rates, self.growth)

    def _is_short(self, part: Probed) -> bool:
        """Tell whether some link was in use too shortly to be known."""
        num_bytes, seconds = part.made.num_bytes, part.seconds
        return any(
            max(num_bytes[group]) < self.most_bytes
            and (max(seconds[group]) < self.least_s or sum(num_bytes[group]) < self.least_bytes)
            for group in part.made.groups
        )

    def _sized(self, made: ProbeRound, rates: Sequence[float], growth: float) -> Sized:
        """Return the round with sizes that should last long enough, and how long it should."""
        num_bytes, lasts_s = list(made.num_bytes), 0.0
        for group in made.groups:
            group_s = max(self._aim_s, self.least_bytes / sum(rates[group]))
            for at in range(*group.indices(len(rates))):
                most = min(growth * num_bytes[at], self.most_bytes)
                num_bytes[at] = ceil(min(group_s * rates[at], most))
                lasts_s = max(lasts_s, num_bytes[at] / rates[at])
        return ProbeRound(made.kind, made.ways, tuple(num_bytes)), lasts_s

    @property
    def _aim_s(self) -> float:
        return AIM * self.least_s


def _filled(rates: FloatArray) -> FloatArray:
    """Return the rates, and for those that are unknown the median of the others."""
    return np.where(rates > 0, rates, np.median(rates[rates > 0])) if rates.any() else rates


def pairs(world_size: int) -> Iterator[tuple[Way, ...]]:
    """Yield rounds of disjoint pairs, both directions of each, until all have met once.

    The circle method: all but the last seat move on by one; with an odd number one rank rests.
    """
    seats = list(range(world_size)) + [-1] * (world_size % 2)
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        met = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield tuple(way for a, b in met if min(a, b) >= 0 for way in ((a, b), (b, a)))
        seats = [seats[-2], *seats[:-2], seats[-1]]


def star(world_size: int, one: int) -> tuple[Way, ...]:
    """Return the ways from all others to one rank, then those from it to them."""
    others = [rank for rank in range(world_size) if rank != one]
    return (*((rank, one) for rank in others), *((one, rank) for rank in others))
