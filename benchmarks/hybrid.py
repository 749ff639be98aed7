"""What claims inside the step bring over the best prediction alone, in the simulator.

A claim costs a hundredth of the best plan's mean step. Constants were chosen on seeds from 1000.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean

from benchmarks._common import Row, main, progress
from benchmarks._rivals import AUTO, RIVALS
from evenstep import sim
from evenstep.claims import Bsp, Hybrid
from evenstep.sim import read_trace, scenario

TRACE = Path(__file__).parent / "traces" / "contention.csv"
PER_WORKER = 64
Task = tuple[str, str, int]  # rule, scenario, seed


def percent(task: Task) -> float:
    """Return one run's regret in percent; the rule "hybrid" is `auto` with claims."""
    who, name, seed = task
    given = read_trace(TRACE) if name == "trace" else scenario(name, world_size=8, seed=seed)
    cluster = given.cluster(PER_WORKER * given.workload.slope_s.shape[1])
    best_s = sim.oracle(cluster, given.workload)
    scheme = Hybrid(claim_s=0.01 * best_s.mean()) if who == "hybrid" else Bsp()
    policy = AUTO(given) if who in ("hybrid", "auto") else RIVALS[who][0](given)
    return 100 * sim.run(policy, cluster, given.workload, scheme=scheme).regret(best_s)


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Compare scenario by scenario."""
    num_seeds = 2 if options.quick else 20
    rules = ["hybrid", "auto", *RIVALS]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("forkserver")) as pool:
        for name in ("burst", "jitter", "trace"):
            seeds = range(1 if name == "trace" else num_seeds)
            progress(f"{name}: {len(rules)} rules, {len(seeds)} seeds")
            tasks = [(who, name, seed) for who in rules for seed in seeds]
            found = list(pool.map(percent, tasks, chunksize=2))
            means = {
                who: fmean(found[k * len(seeds) : (k + 1) * len(seeds)])
                for k, who in enumerate(rules)
            }
            hybrid = means.pop("hybrid")
            best = min(means, key=means.__getitem__)
            yield Row(
                f"hybrid on {name}, claims at 1 % of the step: regret in %",
                "at most half of the best prediction alone",
                {"hybrid": hybrid, "best alone": means[best], "which": best, "auto": means["auto"]},
                hybrid <= means[best] / 2,
            )


if __name__ == "__main__":
    main(__doc__ or "", rows)
