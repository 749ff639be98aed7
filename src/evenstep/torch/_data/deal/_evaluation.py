"""Who evaluates which samples: shares by speed, spread evenly over the order, cut into forwards."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...._planner import PlanCosts, SampleCosts, fitted
from ...._types import IntArray
from ....solve import WorkerCosts, partition
from ....solve._apportion import in_proportion


def spread(sizes: IntArray) -> IntArray:
    """Return the owner of every position, each rank's spread evenly over all of them.

    Data sets are often sorted, by length say: contiguous shares would differ in cost.
    """
    owners = np.repeat(np.arange(len(sizes)), sizes)
    places = np.concatenate([np.arange(size) for size in sizes.tolist()])
    # A rank's j-th of n belongs at (2j + 1) / 2n of the way; in integers, as ranks have to agree.
    way = ((2 * places + 1) << 32) // (2 * sizes[owners])
    ranks: IntArray = owners[np.argsort(way, kind="stable")]
    return ranks


def forwards(
    rank: int, num_samples: int, weights: Sequence[int], *, batch_size: int, lockstep: bool
) -> list[IntArray]:
    """Return the places in the order of what ``rank`` evaluates, forward by forward.

    Ranks share by speed. In lockstep every rank makes as many forwards as any other, of sizes as
    equal as can be, and none of a sample where it has too few.
    """
    if not num_samples:
        return []
    sizes = in_proportion(num_samples, weights)
    mine = np.flatnonzero(spread(sizes) == rank)
    if lockstep:
        return np.array_split(mine, -(-int(sizes.max()) // batch_size))
    return [mine[k : k + batch_size] for k in range(0, len(mine), batch_size)]


def forwards_of_steps(
    rank: int, num_samples: int, weights: Sequence[int], *, step_size: int
) -> list[IntArray]:
    """Return what ``rank`` evaluates, one forward for every ``step_size`` samples of the order.

    Ranks share the samples of each step by speed. Every rank has at least one of each: a last step
    that has fewer samples than there are ranks is added to the one before.

    Args:
        rank: whose.
        num_samples: of the evaluation, none or at least one for each rank.
        weights: of the ranks, by which they share.
        step_size: samples of a step over all ranks, at least one for each.
    """
    ends = [*range(step_size, num_samples, step_size), num_samples]
    if len(ends) > 1 and num_samples - ends[-2] < len(weights):
        del ends[-2]
    found = []
    for first, end in zip([0, *ends], ends, strict=False):
        sizes = in_proportion(end - first, weights)
        while sizes.min() < 1 < sizes.max():
            sizes[sizes.argmax()] -= 1
            sizes[sizes.argmin()] += 1
        found.append(np.flatnonzero(spread(sizes) == rank) + first)
    return found if num_samples else []


def forwards_by_cost(
    rank: int,
    indices: IntArray,
    costs: SampleCosts,
    known: PlanCosts | None,
    *,
    world_size: int,
    batch_size: int,
    lockstep: bool,
) -> list[IntArray]:
    """Return what ``rank`` evaluates, forward by forward, where samples are shared out by cost.

    Args:
        rank: whose.
        indices: of all samples, in order.
        costs: of the data set.
        known: what samples cost each rank, as training has shown; None is equal ranks.
        world_size: number of ranks.
        batch_size: most samples of a forward.
        lockstep: whether every rank makes as many forwards as any other.
    """
    if not len(indices):
        return []
    features = costs.features(indices)
    none = np.zeros(world_size, np.int64)  # no step begins here
    slope = np.tile(costs.start(), (world_size, 1)) if known is None else known.workers().slope
    found = partition(
        features,
        fitted(WorkerCosts(slope, none), features),
        padded=bool(costs.cost.padded),
        forwards=costs.forwards(features, most=batch_size, equal=lockstep, empty=lockstep),
    )
    return list(found.samples(rank))
