"""Splits of the global batch that policies start from, check, mend, and leave."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from .._types import Cluster, IntArray
from ..solve._apportion import apportion

LEAST_SAVING_S = 1e-3  # of a step: less is not worth leaving the equal split


def equal_split(cluster: Cluster) -> IntArray:
    """Return the split that plain data-parallel training uses, as far as the bounds let it."""
    size, rest = divmod(cluster.global_batch_size, cluster.world_size)
    unbound = cluster.min_batch_size.max() <= size < cluster.max_batch_size.min()
    if unbound and cluster.granularity.max() == 1:  # the common case, asked for at every step
        split = np.full(cluster.world_size, size)
        split[:rest] += 1
        return split
    return apportion(np.ones(cluster.world_size), cluster)


def is_feasible(batch_size: IntArray, cluster: Cluster) -> bool:
    """Say whether ``cluster`` allows the split: sum, bounds, granules on all workers but one."""
    return bool(
        batch_size.sum() == cluster.global_batch_size
        and (cluster.min_batch_size <= batch_size).all()
        and (batch_size <= cluster.max_batch_size).all()
        and np.count_nonzero(batch_size % cluster.granularity) <= 1
    )


def refit(batch_size: IntArray, cluster: Cluster) -> IntArray:
    """Return the split itself if it is feasible, else one in proportion to it."""
    if is_feasible(batch_size, cluster):
        return batch_size
    return apportion(np.maximum(batch_size, 1e-3), cluster)


def with_floor(cluster: Cluster) -> Cluster:
    """Return ``cluster`` with a smallest batch of one granule wherever it was zero.

    For rules that know a worker's speed only from the samples it has just computed: nothing
    would ever bring a worker at zero back. Left as it is where the global batch is too small.
    """
    one = np.where(cluster.granularity <= cluster.max_batch_size, cluster.granularity, 0)
    floor = np.maximum(cluster.min_batch_size, one)
    if floor.sum() > cluster.global_batch_size:
        return cluster
    return replace(cluster, min_batch_size=floor)


def within_reach(held: IntArray, cluster: Cluster, factor: float) -> Cluster:
    """Return ``cluster`` with bounds that keep every size within ``factor`` of a split it allows.

    In whole granules, and never tighter than the split itself. A worker at zero may get anything.
    """
    granule = cluster.granularity
    least = (held / factor // granule).astype(np.int64) * granule
    # Past the global batch a factor is no limit. An infinite one cannot be counted with.
    at_most = min(factor, float(cluster.global_batch_size))
    most = np.ceil(held * at_most / granule).astype(np.int64) * granule
    return replace(
        cluster,
        min_batch_size=np.maximum(cluster.min_batch_size, least),
        max_batch_size=np.where(
            held > 0, np.minimum(cluster.max_batch_size, most), cluster.max_batch_size
        ),
    )


def errors_by_chance(world_size: int) -> float:
    r"""Return the standard errors by which the slowest of equal workers may seem slow.

    $2 + \sqrt{2 \ln W}$: of $W$ equal workers the slowest looks slow by about the second part.
    What is gained against the equal split has to exceed that much to be no noise.
    """
    return 2 + math.sqrt(2 * math.log(world_size))
