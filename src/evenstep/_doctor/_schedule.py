"""Whose link is measured when: each pair of hosts in turn, or several pairs at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Pair = tuple[int, int]
"""Receiver and sender."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Turns in which links are measured.

    Attributes:
        turns: pairs that measure at the same time; no host is in two of them.
        skipped: pairs of hosts that there is no time for.
    """

    turns: tuple[tuple[Pair, ...], ...]
    skipped: int = 0


def schedule(hosts: Sequence[Sequence[int]], *, turn_s: float, budget_s: float) -> Schedule:
    """Return the turns for the first rank of every host, and for two ranks of each host.

    Ranks of one host share its link, so one of them measures it. Pairs go one by one as long as
    that fits into ``budget_s``: no measurement disturbs another. Else all hosts measure at once in
    pairs, as in a tournament in which each meets each (the circle method); and where even that
    takes too long, in as many of its rounds as there is time for. Each host has met some others
    then.

    Args:
        hosts: ranks of each host, none empty.
        turn_s: what one turn takes.
        budget_s: what all may take; there is one round at least.
    """
    most = max(2, int(budget_s / turn_s))
    inside = [(ranks[0], ranks[1]) for ranks in hosts if len(ranks) > 1]
    first = [ranks[0] for ranks in hosts]
    rounds = _tournament(first)
    pairs = sum(map(len, rounds))
    if 2 * (pairs + len(inside)) <= most:
        one_by_one = [*((pair,) for pair in inside), *((p,) for each in rounds for p in each)]
        return Schedule(_both_ways(one_by_one))
    within = [tuple(inside)] if inside else []
    kept = rounds[: max(1, most // 2 - len(within))]
    return Schedule(_both_ways([*within, *kept]), pairs - sum(map(len, kept)))


def _tournament(players: Sequence[int]) -> list[tuple[Pair, ...]]:
    """Return rounds in which each meets each once; no rank is in two pairs of a round."""
    ring: list[int | None] = [*players, *([None] if len(players) % 2 else [])]
    half, rounds = len(ring) // 2, []
    for _ in range(len(ring) - 1):
        drawn = zip(ring[:half], reversed(ring[half:]), strict=True)
        pairs = [(a, b) for a, b in drawn if a is not None and b is not None]
        if pairs:
            rounds.append(tuple((min(pair), max(pair)) for pair in pairs))
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


def _both_ways(rounds: Sequence[tuple[Pair, ...]]) -> tuple[tuple[Pair, ...], ...]:
    return tuple(turn for pairs in rounds for turn in (pairs, tuple((b, a) for a, b in pairs)))
