"""Whether `auto` has to be shown other sizes to learn fixed costs, or finds them on its way.

Simulated static clusters: eight workers whose costs per sample differ by a factor, with fixed costs
of unlike sizes, under jitter. What an unknown fixed cost costs is what the steps lose against the
plan that knows it, beside what they lose on the same cluster without fixed costs. A deliberate
excitation at the start could save no more than that.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np

from benchmarks._common import Row, main, progress
from evenstep import Cluster
from evenstep.policies import Auto
from evenstep.sim import Workload, oracle, run

WORLD_SIZE, GLOBAL_BATCH_SIZE, NUM_STEPS, SETTLED = 8, 512, 150, 100
SPREADS = (1.0, 1.05, 1.3, 2.0, 4.0)
EQUAL_STEP_S = 0.64  # of the mean worker, without fixed costs


def loss_percent(fixed: float, spread: float, jitter: float, seed: int) -> tuple[float, float]:
    """Return what steps 1 to 5, and those once settled, lose by their sizes, in percent.

    Args:
        fixed: mean fixed cost, as a share of the equal split's step.
        spread: largest over smallest cost per sample, at most.
        jitter: standard deviation of the logarithm of each time.
        seed: of the cluster.
    """
    draw = np.random.default_rng(seed)
    slope_s = draw.uniform(1, spread, WORLD_SIZE)
    slope_s *= EQUAL_STEP_S * WORLD_SIZE / GLOBAL_BATCH_SIZE / slope_s.mean()
    intercept_s = fixed * EQUAL_STEP_S * draw.uniform(0, 2, WORLD_SIZE)
    slopes_s = np.tile(slope_s, (NUM_STEPS, 1))
    noise = np.exp(draw.normal(0, jitter, slopes_s.shape))
    cluster = Cluster(WORLD_SIZE, GLOBAL_BATCH_SIZE)
    report = run(Auto(), cluster, Workload(intercept_s, slopes_s, noise))
    best_s = oracle(cluster, Workload(intercept_s, slopes_s))
    loss = 100 * ((intercept_s + report.batch_size * slopes_s).max(axis=1) / best_s - 1)
    return float(loss[1:6].mean()), float(loss[SETTLED:].mean())


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Compare clusters with fixed costs with the same ones without."""
    seeds = range(3 if options.quick else 20)
    for jitter in (0.0, 0.02, 0.05):
        progress(f"jitter {jitter:.0%}")
        found = {
            fixed: np.array(
                [loss_percent(fixed, spread, jitter, seed) for spread in SPREADS for seed in seeds]
            )
            for fixed in (0.0, 0.2, 0.5)
        }
        none = found[0.0].mean(axis=0)
        for fixed in (0.2, 0.5):
            early, settled = found[fixed].mean(axis=0)
            yield Row(
                f"fixed costs of {fixed:.0%} of the equal step, jitter {jitter:.0%}",
                "once settled, at most 0.5 points more than without any",
                {
                    "steps_1_to_5": early,
                    "steps_1_to_5_without_any": none[0],
                    "settled": settled,
                    "settled_without_any": none[1],
                    "settled_most": found[fixed][:, 1].max(),
                },
                settled <= none[1] + 0.5,
            )


if __name__ == "__main__":
    main(__doc__, rows)
