"""Whether all ranks reduced the gradients of the same batches: found out on rank 0."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SAME = 1e-6  # shares of a batch are ratios of whole numbers, summed up


@dataclass(frozen=True, slots=True)
class Reduced:
    """What one rank put into one reduction of a model's gradients.

    Attributes:
        model: number of the model, in the order of ``prepare``.
        number: of the reduction, counted for each model.
        shares: by step, how much of the rank's batch went in: 1 is all of it once, 2 is twice;
            None where that is not known.
        maybe: steps of which some went in; their batches weigh alike, so the rank cannot tell them
            apart.
    """

    model: int
    number: int
    shares: Mapping[int, float | None]
    maybe: tuple[int, ...] = ()

    def row(self) -> list[Any]:
        """Return it as plain values."""
        shares = [[step, share] for step, share in self.shares.items()]  # as JSON gives them back
        return [self.model, self.number, shares, list(self.maybe)]

    @classmethod
    def of(cls, row: Sequence[Any]) -> Reduced:
        """Return what ``row`` was made of."""
        model, number, shares, maybe = row
        return cls(model, number, {step: share for step, share in shares}, tuple(maybe))

    def may_be(self, other: Reduced) -> bool:
        """Tell whether ``other`` may be made of the same steps, with the same shares."""
        steps = self.shares.keys() | set(self.maybe)
        if not other.shares.keys() <= steps:
            return False
        pairs = [(share, self.shares.get(step)) for step, share in other.shares.items()]
        return all(
            mine is None or theirs is None or abs(mine - theirs) <= _SAME for theirs, mine in pairs
        )


@dataclass(frozen=True, slots=True)
class Differing:
    """Ranks reduced unlike gradients together.

    Attributes:
        rank: the one that differs from most.
        text: what happened, and what to do.
    """

    rank: int
    text: str


class Reductions:
    """Rank 0's books of reductions that some ranks have told of and some have not.

    Safe to use from several threads: rank 0's own come from its training thread.

    Args:
        world_size: number of workers.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._lock = threading.Lock()
        self._told: defaultdict[tuple[int, int], dict[int, Sequence[Any]]] = defaultdict(dict)

    def take(self, rank: int, rows: Sequence[Sequence[Any]]) -> Differing | None:
        """Take in what a rank reduced; return how it differs from what others did, if it does."""
        with self._lock:
            for row in rows:
                if (differing := self._take(rank, row)) is not None:
                    return differing
        return None

    def steps(self, key: tuple[int, int]) -> tuple[int, list[int]]:
        """Return how many ranks told of a reduction, and of which steps it may be, after them."""
        with self._lock:
            told = [Reduced.of(row) for row in self._told.get(key, {}).values()]
        possible = [one.shares.keys() | set(one.maybe) for one in told]
        return len(told), sorted(set.intersection(*possible)) if possible else []

    def _take(self, rank: int, row: Sequence[Any]) -> Differing | None:
        key = row[0], row[1]
        told = self._told[key]
        told[rank] = row
        if 2 * len(told) > self._world_size and _differ(told.values()):
            return _differing({one: Reduced.of(said) for one, said in told.items()}, key)
        if len(told) == self._world_size:
            del self._told[key]
        return None


def _differ(rows: Iterable[Sequence[Any]]) -> bool:
    """Tell whether ranks cannot have put the same into a reduction."""
    first, *others = rows
    if all(row == first for row in others):
        return False
    told = [Reduced.of(row) for row in (first, *others)]
    return any(not one.may_be(other) for one in told for other in told)


def _differing(told: Mapping[int, Reduced], key: tuple[int, int]) -> Differing:
    kinds = {rank: _words(one) for rank, one in sorted(told.items())}
    (most, _), *_ = Counter(kinds.values()).most_common()
    rank = next((rank for rank, words in reversed(kinds.items()) if words != most), max(kinds))
    others = [other for other, words in kinds.items() if words == most and other != rank]
    return Differing(
        rank,
        f"Rank {rank} reduced gradients of {kinds[rank]} together with those of {most} on "
        f"{_ranks(others)} (reduction {key[1]} of model {key[0]}): that gradient was wrong. Use "
        f"the same batches on every rank, and fetch equally many. To skip a batch, skip it on all "
        f"ranks, by a shared decision such as `balancer.mean(bad) > 0`.",
    )


def _words(one: Reduced) -> str:
    parts = [
        f"step {step}"
        if share is None or abs(share - 1) <= _SAME
        else f"{share:.3g} times step {step}"
        for step, share in sorted(one.shares.items())
    ]
    if one.maybe:
        parts.append("one of the steps " + ", ".join(map(str, one.maybe)))
    return " and ".join(parts) or "no step"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
