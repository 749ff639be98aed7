"""Every policy with its defaults on eight scenarios: `--page FILE` writes the leaderboard.

Simulated workers: nothing here depends on the machine but how long it takes.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from benchmarks._common import Row, main
from benchmarks.regret import NAMES
from evenstep import sim
from evenstep._render import number, percent
from evenstep.policies._by_name import without_settings

WORLD_SIZE, GLOBAL_BATCH_SIZE, NUM_STEPS, NUM_SEEDS = 8, 512, 600, 4
Task = tuple[str, str, int]  # policy, scenario, seed
HEAD = f"""# Leaderboard

Mean step time above the perfect-foresight oracle's, in %: {WORLD_SIZE} workers,
{GLOBAL_BATCH_SIZE} samples a step, {NUM_STEPS} steps, seeds 0 to {NUM_SEEDS - 1}.
"""
LEGEND = """Lower is better. The oracle, at 0, knows the time of every step except for its jitter;
`equal` is plain DDP. A scenario's column is the mean over its seeds, `mean` that over the
scenarios. `idle` is the waiting of all workers as a share of their time, in %.

Every policy has its defaults and receives only the times of the steps. No policy receives
profiles, CPU or memory data, which some could use. The constants of `auto` were chosen on
other seeds of these generators, from 1000.

This page is written by

```console
$ python -m benchmarks.leaderboard --page evidence/leaderboard.md
```
"""


def played(task: Task) -> tuple[float, float, float]:
    """Return one run's regret, samples per second, and idle share."""
    policy, name, seed = task
    given = sim.scenario(name, WORLD_SIZE, NUM_STEPS, seed)
    cluster = given.cluster(GLOBAL_BATCH_SIZE)
    report = sim.run(policy, cluster, given.workload)
    regret = report.regret(sim.oracle(cluster, given.workload))
    return regret, report.samples_per_s, report.idle_share


def standings(policies: tuple[str, ...], num_seeds: int) -> dict[str, dict[str, str]]:
    """Return each policy's cells by column, the lowest mean regret first."""
    tasks = list(product(policies, NAMES, range(num_seeds)))
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("forkserver")) as pool:
        found = np.array(list(pool.map(played, tasks, chunksize=4)))
    found = found.reshape(len(policies), len(NAMES), num_seeds, 3).mean(axis=2)
    means = found.mean(axis=1)
    return {
        policies[at]: {
            **{name: percent(found[at, column, 0]) for column, name in enumerate(NAMES)},
            "mean": percent(means[at, 0]),
            "samples/s": number(means[at, 1]),
            "idle": percent(means[at, 2]),
        }
        for at in means[:, 0].argsort(kind="stable")
    }


def page(lines: dict[str, dict[str, str]]) -> str:
    """Return the standings as a page of the documentation."""
    names = list(next(iter(lines.values())))
    rows = [["policy", *names], ["---", *["---:"] * len(names)]]
    rows += [[policy, *cells.values()] for policy, cells in lines.items()]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
    return f"{HEAD}\n{table}\n\n{LEGEND}"


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each policy, and write the page if asked to."""
    policies = ("auto", "equal") if options.quick else without_settings()
    lines = standings(policies, 1 if options.quick else NUM_SEEDS)
    if options.page is not None:
        options.page.write_text(page(lines), encoding="utf-8")
    for policy, cells in lines.items():
        yield Row(f"{policy}: regret in %, samples/s and idle in %", "reported", dict(cells))


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--page", type=Path, help="write the leaderboard into this file")


if __name__ == "__main__":
    main(__doc__ or "", rows, _add_options)
