"""What the solver is compared with: random problems, exhaustive search, an integer program."""

from __future__ import annotations

import itertools

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from evenstep import AffineTime, Cluster

from ..tables import TableTime

KINDS = ("affine", "ties", "staircase", "jumps")


def problem(kind, seed, *, most_workers=5, most_samples=24):
    """Return a random time model and a cluster with bounds and granularity that can be met."""
    random = np.random.default_rng([KINDS.index(kind), seed])
    world_size = int(random.integers(1, most_workers + 1))
    while True:
        try:
            cluster = Cluster(
                world_size,
                int(random.integers(1, most_samples + 1)),
                random.integers(0, 4, world_size),
                random.integers(0, most_samples, world_size) if random.random() < 0.7 else None,
                random.integers(1, 5, world_size) if random.random() < 0.7 else 1,
            )
        except ValueError:
            continue
        return _times(kind, random, cluster), cluster


def _times(kind, random, cluster):
    shape = (cluster.world_size, cluster.global_batch_size)
    if kind == "affine":
        return AffineTime(random.uniform(0, 20, shape[0]), random.uniform(0.1, 5, shape[0]))
    if kind == "ties":
        return AffineTime(random.integers(0, 4, shape[0]) * 2.0, random.integers(0, 3, shape[0]))
    if kind == "staircase":
        width, height = random.integers(1, 6, shape[0]), random.integers(0, 4, shape[0])
        steps = np.ceil(np.arange(1, shape[1] + 1) / width[:, None]) * height[:, None]
    else:
        steps = np.cumsum(random.exponential(size=shape) * (random.random(shape) < 0.4), axis=1)
    return TableTime(np.concatenate([np.zeros((shape[0], 1)), steps], axis=1))


def keeps_the_rules(batch_size, cluster):
    """Say whether a split adds up, within bounds, in whole granules on all workers but one."""
    return (
        batch_size.sum() == cluster.global_batch_size
        and (cluster.min_batch_size <= batch_size).all()
        and (batch_size <= cluster.max_batch_size).all()
        and (batch_size % cluster.granularity > 0).sum() <= 1
    )


def curves(times, cluster):
    """Return the seconds of every worker at every size, ``(world_size, global_batch_size + 1)``."""
    sizes = range(cluster.global_batch_size + 1)
    return np.stack([times.seconds(np.full(cluster.world_size, b)) for b in sizes], axis=1)


def by_enumeration(times, cluster):
    """Return the smallest makespan over every split that keeps the rules; for few samples."""
    seconds = curves(times, cluster)
    limits = zip(cluster.min_batch_size, cluster.max_batch_size, strict=True)
    best = np.inf
    for split in itertools.product(*(range(lo, hi + 1) for lo, hi in limits)):
        if keeps_the_rules(np.array(split), cluster):
            best = min(best, max(seconds[rank, b] for rank, b in enumerate(split)))
    return best


def by_table(times, cluster):
    """Return the smallest makespan by dynamic programming over workers and samples dealt.

    ``best[parts][n]`` is that of n samples dealt to the workers so far, of which ``parts`` (0 or
    1) carry less than a whole granule.
    """
    total = cluster.global_batch_size
    seconds = curves(times, cluster)
    best = np.full((2, total + 1), np.inf)
    best[0, 0] = 0.0
    for rank in range(cluster.world_size):
        after = np.full_like(best, np.inf)
        for b in range(cluster.min_batch_size[rank], cluster.max_batch_size[rank] + 1):
            part = int(b % cluster.granularity[rank] > 0)
            before = np.maximum(best[: 2 - part, : total + 1 - b], seconds[rank, b])
            after[part:, b:] = np.minimum(after[part:, b:], before)
        best = after
    return best[:, total].min()


def by_integer_program(times, cluster):
    """Return the smallest makespan by `scipy.optimize.milp`: one switch per worker and size."""
    seconds = curves(times, cluster)
    limits = zip(cluster.min_batch_size, cluster.max_batch_size, strict=True)
    choices = [(rank, b) for rank, (lo, hi) in enumerate(limits) for b in range(lo, hi + 1)]
    rank, size = np.array(choices).T
    of_rank = (rank == np.arange(cluster.world_size)[:, None]).astype(float)
    part = size % cluster.granularity[rank] > 0
    rows = [
        (np.append(size, 0.0)[None], cluster.global_batch_size, cluster.global_batch_size),
        (np.append(part, 0.0)[None], 0, 1),
        (np.c_[of_rank, np.zeros(len(of_rank))], 1, 1),
        (np.c_[of_rank * seconds[rank, size], -np.ones(len(of_rank))], -np.inf, 0),
    ]
    found = milp(
        np.append(np.zeros(len(choices)), 1.0),
        integrality=np.append(np.ones(len(choices)), 0),
        bounds=Bounds(0, np.append(np.ones(len(choices)), np.inf)),
        constraints=[LinearConstraint(*row) for row in rows],
        options={"mip_rel_gap": 0},
    )
    if not found.success:
        raise RuntimeError(found.message)
    return found.fun
