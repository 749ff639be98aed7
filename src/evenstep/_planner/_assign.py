"""Who computes which samples of a step, within what is known to fit as far as they allow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from .._types import IntArray
from ..solve import Assignment, WorkerCosts, partition
from ._sample_costs import SampleCosts


def assign(
    costs: SampleCosts,
    features: IntArray,
    workers: WorkerCosts,
    *,
    caps: Sequence[int] | None = None,
    whole: bool = False,
    equal_forwards: bool = False,
) -> Assignment:
    """Return who computes which samples of a step, and in which forward.

    Args:
        costs: of the data set.
        features: of the samples, ``(num_samples, num_features)``.
        workers: what those cost each worker.
        caps: size of a forward that fits on every worker; None is no limit beside that of ``Cost``.
            Where samples leave no way, forwards are larger by as little as an eighth can tell: all
            samples are computed.
        whole: whether every worker has a single forward.
        equal_forwards: whether all workers make as many forwards, where samples suffice.
    """
    num_samples, world_size, fewer = len(features), workers.world_size, None
    equal = equal_forwards and num_samples >= 2 * world_size
    if equal:  # in one forward each they do not fit: the last one's time is not known
        fewer = -(-num_samples // world_size) - 1
    split = partial(partition, features, fitted(workers, features), padded=bool(costs.cost.padded))
    forwards = partial(costs.forwards, features, most=fewer)
    sizes = features[:, 1]
    most = costs.cost.max_size or num_samples * int(sizes.max())
    for room in () if caps is None else _rooms(np.array(caps), most, sizes):
        few = whole and num_samples < world_size
        within = forwards(equal=equal or whole, empty=few, max_size=room)
        with suppress(ValueError):  # there may be no way with so many samples
            found = split(forwards=within)
            if not whole or found.num_forwards.max() == 1:
                return found
    return split(forwards=forwards(equal=equal))


def fitted(workers: WorkerCosts, features: IntArray) -> WorkerCosts:
    """Return workers in a unit in which a step's samples can be partitioned, each at some cost.

    Those that cost nothing would all go to one worker, whose forward then has most of the step: of
    length 0, or rounded away beside what is far larger. They count as one unit each.

    Args:
        workers: rounded for another data set, perhaps.
        features: of the samples, of which the first is 1, ``(num_samples, num_features)``.
    """
    found = workers.fitting(features)
    counts = np.unique(found.slope > 0, axis=0)
    if all(features[:, one].any(axis=1).all() for one in counts):
        return found
    slope = found.slope.copy()
    slope[:, 0] = np.maximum(slope[:, 0], 1)
    return WorkerCosts(slope, found.intercept)


def _rooms(caps: IntArray, most: int, sizes: IntArray) -> Iterator[IntArray]:
    """Yield sizes of a forward on every worker, ``(world_size,)``: the caps, then more and more.

    Samples that are larger than all caps go to the workers with the largest ones: at most as many
    workers, with caps that differ by less than a quarter.
    """
    room = np.minimum(caps, most)
    top = int(room.max())
    larger = np.count_nonzero(sizes > top)
    takers = np.argsort(-room, kind="stable")[:larger]
    room[takers[4 * room[takers] > 3 * top]] = sizes.max()
    while (room < most).any():
        yield room
        room = np.minimum(room + room // 8 + 1, most)
