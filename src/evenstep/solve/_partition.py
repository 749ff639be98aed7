"""Which sample of a step goes to which worker, by the costs of samples and workers' speeds.

Samples that take as long as the longest of their forward are runs of the sorted samples.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from operator import mul
from typing import Any, final

import numpy as np

from .._types import IntArray
from ..exceptions import invalid
from ._problem import NEVER, Forwards, Problem, WorkerCosts


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
    """Return owners, forwards within their owner, and the number of forwards of each worker.

    For costs that add up: the longest first, then moves and swaps from the slowest worker. The
    samples of one worker are packed into forwards under caps.
    """
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


_FINE = 12  # bits to which the time is found: 1 part in 4,096


def assign_padded(problem: Problem) -> tuple[IntArray, IntArray, IntArray]:
    """Return owners, forwards within their owner, and the number of forwards of each worker.

    Neighbours in the sorted order share a forward, as padding is least then. Which worker has the
    longest ones is tried: each order of workers that differ where these are few, else a selection.
    """
    runs = _Runs(problem)
    # Whatever `is_capped` says: of padded samples it does not know how much room they take.
    num_forwards = runs.fewest() if problem.equal else None
    cuts, order = runs.best(num_forwards)
    owner = np.empty(problem.num_samples, np.int64)
    forward = np.empty(problem.num_samples, np.int64)
    numbers = np.ones(problem.world_size, np.int64)
    first = 0
    for rank, sizes in zip(order, cuts, strict=True):
        for number, size in enumerate(sizes):
            samples = runs.samples[first : first + size]
            owner[samples], forward[samples] = rank, number
            first += size
        numbers[rank] = num_forwards or max(len(sizes), 1)
    return owner, forward, numbers


Cuts = list[list[int]]  # sizes of each forward's run, worker by worker along the order


@final
class _Runs:
    """The samples from the longest to the shortest, and who may take runs of them: in lists."""

    def __init__(self, problem: Problem) -> None:
        self.samples = samples = np.lexsort(problem.features.T)[::-1]
        self.features: list[list[int]] = problem.features[samples].tolist()
        largest_left = np.maximum.accumulate(problem.size[samples][::-1])[::-1]
        self.sizes: list[int] = largest_left.tolist()
        self.slope: list[list[int]] = problem.workers.slope.tolist()
        self.intercept: list[int] = problem.workers.intercept.tolist()
        self.max_size: list[int] = problem.max_size.tolist()
        self.max_samples, self.empty = problem.max_samples, problem.empty

    def cut(self, order: tuple[int, ...], end: int, num_forwards: int | None) -> Cuts | None:
        """Return the runs in which all are done by ``end``; None if there is no way.

        Each worker takes as many of the longest samples left as it can: what it leaves to others
        could be no shorter.
        """
        first, num_samples, cuts = 0, len(self.sizes), []
        enough = not self.empty and num_samples >= len(order) * (num_forwards or 1)
        for place, rank in enumerate(order):
            others = (len(order) - place - 1) * (num_forwards or 1)
            budget, runs = end - self.intercept[rank], list[int]()
            while first < num_samples and (num_forwards is None or len(runs) < num_forwards):
                still = 1 if num_forwards is None else num_forwards - len(runs)
                each = sum(map(mul, self.slope[rank], self.features[first]))
                in_time = budget // still // each if each else num_samples
                cap = min(self.max_samples, self.max_size[rank] // max(self.sizes[first], 1))
                kept = others + still - 1 if enough else 0
                size = min(in_time, cap, num_samples - first - kept)
                if size < 1:
                    break
                runs.append(size)
                budget -= size * each
                first += size
                if num_forwards is None and size < cap:
                    break
            if enough and len(runs) < (num_forwards or 1):
                return None
            cuts.append(runs)
        return cuts if first == num_samples else None

    def best(self, num_forwards: int | None) -> tuple[Cuts, tuple[int, ...]]:
        """Return the runs that end first, of the orders tried, and their order."""
        latest = self._latest()
        found: tuple[Cuts, tuple[int, ...]] | None = None
        for order in self._orders():
            sooner = latest if found is None else latest - (latest >> _FINE) - 1
            cuts = self.cut(order, sooner, num_forwards)
            if cuts is not None:
                latest, cuts = self._soonest(order, sooner, cuts, num_forwards)
                found = cuts, order
        if found is None:
            raise invalid(
                "Forwards(max_size=...)",
                "hold all samples in forwards that are padded to their longest one",
                self.max_size,
                "Raise the caps of a forward, or, of equal forwards, allow some to be empty by "
                "`empty=True`.",
            )
        return found

    def _soonest(
        self, order: tuple[int, ...], end: int, cuts: Cuts, num_forwards: int | None
    ) -> tuple[int, Cuts]:
        """Return the time by which all can be done, to some bits, and the runs."""
        before = 0
        while end - before > 1 + (end >> _FINE):
            middle = (before + end) // 2
            found = self.cut(order, middle, num_forwards)
            if found is None:
                before = middle
            else:
                end, cuts = middle, found
        return end, cuts

    def fewest(self) -> int:
        """Return the least number of equal forwards with which caps can be kept."""
        most = len(self.sizes) if self.empty else max(len(self.sizes) // len(self.slope), 1)
        for number in range(1, most):
            if any(self.cut(order, self._latest(), number) for order in self._orders()):
                return number
        return most

    def _latest(self) -> int:
        """Return a time by which any worker could do all samples."""
        longest: list[int] = [sum(map(mul, slope, self.features[0])) for slope in self.slope]
        return max(self.intercept) + len(self.sizes) * max(longest)

    def _orders(self) -> Iterator[tuple[int, ...]]:
        """Yield orders of the workers, the one that has the longest samples first."""
        ranks = range(len(self.slope))
        typical = self.features[len(self.features) // 2]
        kind = [
            (sum(map(mul, self.slope[rank], typical)), self.intercept[rank], self.max_size[rank])
            for rank in ranks
        ]
        slow_last = tuple(sorted(ranks, key=lambda rank: kind[rank]))
        if len(ranks) <= 5:
            tried = set()
            for order in permutations(slow_last):
                along = tuple(kind[rank] for rank in order)
                if along not in tried:
                    tried.add(along)
                    yield order
            return
        yield slow_last
        if len(set(kind)) == 1:
            return
        yield slow_last[::-1]
        kinds = sorted(set(kind))
        for blocks in permutations(kinds) if len(kinds) <= 5 else ():
            yield tuple(sorted(ranks, key=lambda rank: blocks.index(kind[rank])))


@final
@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """Which worker computes which samples of a step, in which forward.

    Attributes:
        owner: rank of every sample, read-only, ``(num_samples,)``.
        forward: number of its forward within its rank, from 0, read-only, ``(num_samples,)``.
        num_forwards: of every rank, ``(world_size,)``.
        load: when every rank ends, in the unit of the costs, ``(world_size,)``.
        bound: a time that no assignment beats.
        limit: the reason for the bound: ``"work"``, all costs over all speeds, or ``"sample"``, a
            single sample that takes as long on its best worker.
    """

    owner: IntArray
    forward: IntArray
    num_forwards: IntArray
    load: IntArray
    bound: int
    limit: str

    def __post_init__(self) -> None:
        for array in (self.owner, self.forward, self.num_forwards, self.load):
            array.flags.writeable = False

    def samples(self, rank: int) -> tuple[IntArray, ...]:
        """Return the samples of each forward of ``rank``, ascending."""
        own = np.flatnonzero(self.owner == rank)
        return tuple(own[self.forward[own] == one] for one in range(self.num_forwards[rank]))

    @property
    def checksum(self) -> int:
        """CRC-32 of the assignment, which ranks compare."""
        return zlib.crc32(self.forward.tobytes(), zlib.crc32(self.owner.tobytes()))


def partition(
    features: Any,
    workers: WorkerCosts | int,
    *,
    padded: bool = False,
    forwards: Forwards = Forwards(),  # noqa: B008  # a frozen value
) -> Assignment:
    r"""Assign samples to workers so that the last worker ends as early as possible.

    A sample $i$ with features $x_i$ takes worker $r$ the time $c_{ri} = s_r \cdot x_i$, and the
    worker ends at $a_r + \sum_{i} c_{ri}$. With ``padded``, each forward of $n$ samples takes
    $n \max_i c_{ri}$ instead.

    Additive costs: samples go, in descending order of cost, to the worker that ends first with
    them; then samples of the slowest worker are moved and swapped as long as it gains. Padded
    costs: the samples, sorted, are cut into runs, one for each forward, by bisection on the time
    at which all end.

    Equal workers take turns at the longest samples, in an order that follows from the samples. If
    one worker always had them, fits to its times would take the cost of long samples for its speed.

    All arithmetic is on integers, so ranks with the same arguments find the same assignment on any
    CPU. It is within a few percent of ``bound`` from four samples per worker on; with fewer, single
    samples decide. The bound of padded costs leaves out padding, so it may be far from reach.

    Usage:
        evenstep.solve.partition(lengths, 4).samples(0)[0]  # of rank 0, of 4 equal ones

    Args:
        features: features of the samples, integers of at least 0, ``(num_samples, num_features)``;
            or ``(num_samples,)`` for one feature. For padded costs, a sample that exceeds another
            in one feature has to be at least as large in each.
        workers: their costs; or the number of equal workers.
        padded: whether all samples of a forward take as long as its longest one.
        forwards: how the samples of a worker are cut into forwards.

    Returns:
        The assignment. Every worker has a sample in each of its forwards, unless there are fewer
        samples than workers, or no sample fits: then some workers have one forward without any.

    Raises:
        ValueError: an argument is out of range, features of padded samples cannot be sorted, or a
            sample fits into no forward.
        OverflowError: the costs of all samples together exceed 2**50.
    """
    costs = workers if isinstance(workers, WorkerCosts) else WorkerCosts.equal(workers, features)
    problem = Problem(features, costs, forwards)
    if padded:
        _check_sortable(problem.features)
    owner, forward, num_forwards = (assign_padded if padded else assign_additive)(problem)
    turned = _turns(problem)
    owner, num_forwards = turned[owner], num_forwards[np.argsort(turned)]
    bound, limit = problem.bound()
    load = problem.load(owner, forward, padded=padded)
    return Assignment(owner, forward, num_forwards, load, bound, limit)


def _turns(problem: Problem) -> IntArray:
    """Return who takes the place of each worker: the next ones of those that equal it, in a ring.

    By how many places follows from the samples, as ranks have to agree on it.
    """
    workers = problem.workers
    rows = np.column_stack([workers.slope, workers.intercept, problem.max_size])
    _, kind = np.unique(rows, axis=0, return_inverse=True)
    found = np.arange(problem.world_size)
    places = int(problem.features.sum())
    for one in range(kind.max() + 1):
        ranks = np.flatnonzero(kind == one)
        found[ranks] = np.roll(ranks, -(places % len(ranks)))
    return found


def _check_sortable(features: IntArray) -> None:
    order = np.lexsort(features.T[::-1])
    if (np.diff(features[order], axis=0) < 0).any():
        raise invalid(
            "partition(features=...)",
            "grow together where costs are padded",
            "two samples of which each is larger in one feature",
            "Give functions of one length, such as L and L**2.",
        )
