"""Which sample of a step goes to which worker, by the costs of samples and workers' speeds."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from .._types import IntArray
from ..exceptions import invalid
from ._additive import assign_additive
from ._padded import assign_padded
from ._problem import Forwards, Problem, WorkerCosts


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
    problem = Problem.of(features, costs, forwards)
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
