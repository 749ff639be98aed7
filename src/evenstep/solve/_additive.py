"""Samples whose costs add up: the longest first, then moves and swaps from the slowest worker.

The samples of one worker are packed into forwards under caps.
"""

from __future__ import annotations

import numpy as np

from .._types import IntArray
from ..exceptions import invalid
from ._problem import NEVER, Problem


def pack(
    size: IntArray, max_size: int, max_samples: int, num_forwards: int | None, *, empty: bool
) -> IntArray | None:
    """Return the forward of each sample, or None where they do not fit.

    The largest first, each into the forward that has least, so that forwards are alike; where
    that fails, each into the fullest one that it fits into.

    Args:
        size: of the samples, none past ``max_size``, ``(num_samples,)``.
        max_size: of a forward.
        max_samples: of a forward.
        num_forwards: how many there are; None takes as few as are found to do.
        empty: whether some may be left without a sample.
    """
    fewest = max(-(-len(size) // max_samples), -(-int(size.sum()) // max(max_size, 1)), 1)
    if num_forwards is not None:
        numbers = range(num_forwards, num_forwards + 1) if num_forwards >= fewest else range(0)
    else:
        numbers = range(fewest, max(len(size), 1) + 1)
    order = np.argsort(-size, kind="stable").tolist()
    for number in numbers:
        for fullest in (False, True):
            found = _try(
                size.tolist(), order, (max_size, max_samples), number, fullest=fullest, empty=empty
            )
            if found is not None:
                return np.array(found, np.int64)
    return None


def _try(
    size: list[int],
    order: list[int],
    most: tuple[int, int],
    number: int,
    *,
    fullest: bool,
    empty: bool,
) -> list[int] | None:
    held, counts, forward = [0] * number, [0] * number, [0] * len(size)
    for place, sample in enumerate(order):
        open_ = [
            one
            for one in range(number)
            if held[one] + size[sample] <= most[0] and counts[one] < most[1]
        ]
        if not empty and counts.count(0) >= len(order) - place:
            open_ = [one for one in open_ if not counts[one]]
        if not open_:
            return None
        one = (max if fullest else min)(open_, key=lambda one: held[one])
        held[one] += size[sample]
        counts[one] += 1
        forward[sample] = one
    return forward


_BLOCK = 256  # samples whose costs are taken together
_MOST_COSTS = 4_000_000  # that the search for moves and swaps looks at, whatever it finds
_NUM_PARTNERS = 32  # workers with which the slowest one swaps: those that end first
_GOOD_PER_MILLE = 1001  # of the bound, at which the search ends


def assign_additive(problem: Problem) -> tuple[IntArray, IntArray, IntArray]:
    """Return owners, forwards within their owner, and the number of forwards of each worker."""
    if not (problem.equal and problem.is_capped):
        owner = _Search(problem, _by_cost(problem)).run()
        found = _packed(problem, owner, None)
        assert found is not None, "no sample is larger than the caps of its worker"
        return found
    least = 0 if problem.empty else problem.world_size
    for num_forwards in range(_fewest(problem), problem.num_samples + 1):
        if num_forwards * least > problem.num_samples:
            break
        dealt = _into_forwards(problem, num_forwards)
        if dealt is not None:
            owner = _Search(problem, dealt[0].copy(), num_forwards).run()
            return _packed(problem, owner, num_forwards) or dealt
    raise invalid(
        "Forwards(equal=True)",
        "leave every worker a sample in each forward, and every sample a forward",
        f"{problem.num_samples} samples for {problem.world_size} workers",
        "Raise the caps of a forward, or allow empty ones by `empty=True`.",
    )


def _by_cost(problem: Problem) -> IntArray:
    """Give each sample, the most expensive first, to the worker that ends first with it."""
    load, owner = problem.workers.intercept.copy(), np.empty(problem.num_samples, np.int64)
    finish = np.empty_like(load)
    order = problem.descending()
    for first in range(0, len(order), _BLOCK):
        samples = order[first : first + _BLOCK]
        owners = []
        for cost in problem.costs(samples):
            np.add(load, cost, out=finish)
            rank = int(finish.argmin())
            load[rank] = finish[rank]
            owners.append(rank)
        owner[samples] = owners
    return owner


def _into_forwards(
    problem: Problem, num_forwards: int
) -> tuple[IntArray, IntArray, IntArray] | None:
    """Do the same with forwards that are kept within their caps; None if a sample finds none."""
    load, shape = problem.workers.intercept.copy(), (problem.world_size, num_forwards)
    held, counts = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    owner, forward = (np.empty(problem.num_samples, np.int64) for _ in range(2))
    order = problem.descending()
    for place, (sample, cost) in enumerate(zip(order, problem.costs(order), strict=True)):
        size = problem.size[sample]
        open_ = (held + size <= problem.max_size[:, None]) & (counts < problem.max_samples)
        if not problem.empty and np.count_nonzero(counts == 0) >= problem.num_samples - place:
            open_ &= counts == 0
        finish = np.where(open_.any(axis=1), load + cost, NEVER)
        rank = int(finish.argmin())
        if finish[rank] >= NEVER:
            return None
        number = int(np.where(open_[rank], held[rank], NEVER).argmin())
        owner[sample], forward[sample], load[rank] = rank, number, finish[rank]
        held[rank, number] += size
        counts[rank, number] += 1
    return owner, forward, np.full(problem.world_size, num_forwards)


def _fewest(problem: Problem) -> int:
    """Return the number of equal forwards below which caps leave no way."""
    by_count = -(-problem.num_samples // (problem.max_samples * problem.world_size))
    by_size = -(-int(problem.size.sum()) // int(np.minimum(problem.max_size, 1 << 40).sum()))
    return max(by_count, by_size, 1)


def _packed(
    problem: Problem, owner: IntArray, num_forwards: int | None
) -> tuple[IntArray, IntArray, IntArray] | None:
    """Return the assignment with each worker's samples in forwards; None where they do not fit."""
    forward = np.zeros(problem.num_samples, np.int64)
    numbers = np.ones(problem.world_size, np.int64)
    for rank in range(problem.world_size) if problem.is_capped else ():
        own = np.flatnonzero(owner == rank)
        found = pack(
            problem.size[own],
            int(problem.max_size[rank]),
            problem.max_samples,
            num_forwards,
            empty=problem.empty,
        )
        if found is None:
            return None
        forward[own] = found
        numbers[rank] = num_forwards or int(found.max(initial=0)) + 1
    return owner, forward, numbers


class _Search:
    """Moves and swaps from the slowest worker.

    Args:
        problem: what is to be partitioned.
        owner: of every sample, changed in place.
        num_forwards: of each worker, whose caps together cap the worker; None is any number.
    """

    def __init__(self, problem: Problem, owner: IntArray, num_forwards: int | None = None) -> None:
        self._problem = problem
        self._owner = owner
        self._home = (problem.features * problem.workers.slope[owner]).sum(axis=1)  # cost there
        self._load = problem.workers.intercept.copy()
        self._sizes = np.zeros(problem.world_size, np.int64)
        np.add.at(self._load, owner, self._home)
        np.add.at(self._sizes, owner, problem.size)
        self._counts = np.bincount(owner, minlength=problem.world_size)
        self._least = 0 if problem.empty and num_forwards else num_forwards or 1
        self._is_capped = num_forwards is not None
        if num_forwards is not None:
            self._most_samples = problem.max_samples * num_forwards
            self._most_size = np.minimum(problem.max_size, NEVER // num_forwards) * num_forwards

    def run(self) -> IntArray:
        """Return the owner of every sample."""
        self._fill()
        self._improve()
        return self._owner

    def _fill(self) -> None:
        """Give workers with too few samples some of those that cost least elsewhere."""
        if self._problem.num_samples < self._least * self._problem.world_size:
            return
        while self._counts[needy := int(self._counts.argmin())] < self._least:
            donors = self._counts[self._owner] > self._least
            fits = self._problem.size <= self._problem.max_size[needy]
            able = np.flatnonzero(donors & fits)
            if not len(able):
                return
            costs = self._problem.features[able] @ self._problem.workers.slope[needy]
            self._move(int(able[costs.argmin()]), needy)

    def _improve(self) -> None:
        """Move a sample of the slowest worker, or swap it, as long as the two of them gain."""
        bound, _ = self._problem.bound()
        looked = 0
        while looked < _MOST_COSTS:
            slowest = int(self._load.argmax())
            if int(self._load[slowest]) * 1000 <= bound * _GOOD_PER_MILLE:
                return
            own = np.flatnonzero(self._owner == slowest)
            partners = np.argsort(self._load, kind="stable")[:_NUM_PARTNERS]
            partners = partners[partners != slowest]
            others = np.flatnonzero(np.isin(self._owner, partners))
            looked += len(own) * (len(others) + len(partners)) + len(self._owner)
            if not self._better(slowest, own, partners, others):
                return

    def _better(self, slowest: int, own: IntArray, partners: IntArray, others: IntArray) -> bool:
        """Do what lowers the later end of two workers most, if anything does."""
        load, top = self._load, int(self._load[slowest])
        costs = self._problem.costs(own)
        left = top - self._home[own][:, None]
        after_move = np.maximum(load[partners] + costs[:, partners], left)
        if self._counts[slowest] <= self._least:
            after_move[:] = NEVER
        partner = self._owner[others]
        back = self._problem.features[others] @ self._problem.workers.slope[slowest]
        after_swap = np.maximum(load[partner] - self._home[others] + costs[:, partner], left + back)
        if self._problem.is_capped:
            after_swap[:, self._problem.size[others] > self._problem.max_size[slowest]] = NEVER
        if self._is_capped:
            self._keep_caps(slowest, own, partners, others, after_move, after_swap)
        move, swap = after_move.min(initial=NEVER), after_swap.min(initial=NEVER)
        if min(move, swap) >= top:
            return False
        if move <= swap:
            sample, place = divmod(int(after_move.argmin()), len(partners))
            self._move(int(own[sample]), int(partners[place]))
        else:
            sample, place = divmod(int(after_swap.argmin()), len(others))
            self._move(int(own[sample]), int(partner[place]))
            self._move(int(others[place]), slowest)
        return True

    def _keep_caps(
        self,
        slowest: int,
        own: IntArray,
        partners: IntArray,
        others: IntArray,
        after_move: IntArray,
        after_swap: IntArray,
    ) -> None:
        """Rule out what leaves a worker more than its forwards can hold."""
        size = self._problem.size
        held = self._sizes[partners] + size[own][:, None]
        after_move[(held > self._most_size[partners])] = NEVER
        after_move[:, self._counts[partners] >= self._most_samples] = NEVER
        more = size[own][:, None] - size[others]
        partner = self._owner[others]
        over = self._sizes[partner] + more > self._most_size[partner]
        after_swap[over | (self._sizes[slowest] - more > self._most_size[slowest])] = NEVER

    def _move(self, sample: int, rank: int) -> None:
        before = int(self._owner[sample])
        cost = int(self._problem.features[sample] @ self._problem.workers.slope[rank])
        self._load[before] -= self._home[sample]
        self._load[rank] += cost
        self._home[sample] = cost
        self._owner[sample] = rank
        for one, sign in ((before, -1), (rank, 1)):
            self._counts[one] += sign
            self._sizes[one] += sign * self._problem.size[sample]
