"""Workers with known times, to run policies on; the benchmark of the policies uses them too."""

import numpy as np

from evenstep import AffineTime, StepTimings, allocate

FOUR_GPUS = np.array([0.0818, 0.0815, 0.0854, 0.3929]) / 128
"""Seconds per sample of the GPUs of LBB's paper, taken for proportional."""


def measured(batch_size, compute_s):
    """Return the timings of a step in which nobody waited for input."""
    sizes = np.array(batch_size)
    return StepTimings(sizes, np.array(compute_s, float), data_s=np.zeros(len(sizes)))


def unlike_workers(seed=0, world_size=8):
    """Return fixed costs and costs per sample of workers up to four times apart."""
    rng = np.random.default_rng(seed)
    return rng.uniform(0.002, 0.02, world_size), 1e-3 * 4 ** rng.uniform(0, 1, world_size)


def follow(policy, cluster, intercept_s, slopes_s, *, factors=None, start=None):
    """Return every decision of a run, the first one included.

    ``slopes_s`` and ``factors``, by which times are multiplied, hold one row per step. ``start``
    is a decision to go on from.
    """
    decisions = [start or policy.init(cluster)]
    for step, slope_s in enumerate(slopes_s):
        sizes = decisions[-1].batch_size
        compute_s = intercept_s + slope_s * sizes
        if factors is not None:
            compute_s = compute_s * factors[step]
        decisions.append(policy.update(cluster, measured(sizes, compute_s), decisions[-1].state))
    return decisions


def jitter(share, num_steps, world_size, seed):
    """Return factors that make every time noisy by ``share``."""
    noise = np.random.default_rng(seed).standard_normal((num_steps, world_size))
    return np.exp(share * noise)


def sizes_of(decisions):
    """Return batch sizes, one row per decision."""
    return np.array([decision.batch_size for decision in decisions])


def largest_change(sizes):
    """Return the largest relative change of one worker's batch from one row to the next."""
    return float((abs(np.diff(sizes, axis=0)) / sizes[:-1]).max())


def above_best(sizes, cluster, intercept_s, slope_s):
    """Return by how much each row of sizes takes longer than the best split, as a share."""
    times = AffineTime(np.broadcast_to(intercept_s, slope_s.shape), slope_s)
    best_s = times.seconds(allocate(times, cluster)).max()
    return np.array([times.seconds(row).max() for row in sizes]) / best_s - 1


def steps_until(above, share):
    """Return after how many steps ``above`` is within ``share`` for good, or None."""
    outside = np.flatnonzero(above > share)
    if len(outside) == 0:
        return 0
    return None if outside[-1] == len(above) - 1 else int(outside[-1]) + 1
