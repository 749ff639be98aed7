"""The solver against exhaustive search and an integer program, and what one decision costs.

Run: ``python -m benchmarks.solver [--json] [--quick] [--full]``. The search by table covers every
case. The integer program takes some milliseconds a case and stops after two minutes, unless
``--full`` is given; the row says how many cases it reached.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import numpy as np

from evenstep import AffineTime, Cluster, allocate
from evenstep.solve._allocate import makespan_s
from tests.solve.split_reference import (
    KINDS,
    by_integer_program,
    by_table,
    keeps_the_rules,
    problem,
)

from ._common import Row, main, progress

MILP_LIMIT_S = 120


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Yield agreement first, then the time of a decision at several sizes."""
    num_cases = 400 if options.quick else 10_000
    limit_s = float("inf") if options.full else 10 if options.quick else MILP_LIMIT_S
    yield agreement("exhaustive search (dynamic program)", by_table, num_cases, float("inf"), 0.0)
    yield agreement("scipy.optimize.milp", by_integer_program, num_cases, limit_s, 1e-6)
    for world_size, samples, bar_ms in ((8, 64, 0.5), (64, 64, None), (10_000, 64, 10.0)):
        yield cost(world_size, samples * world_size, bar_ms, 20 if options.quick else 200)


def agreement(
    name: str, reference: Callable[..., float], num_cases: int, limit_s: float, tolerance: float
) -> Row:
    """Compare makespans on random cases, all kinds of times in turn."""
    progress(f"{num_cases} cases against {name}")
    worst, different, broken, reached, started_s = 0.0, 0, 0, 0, time.perf_counter()
    for case in range(num_cases):
        if time.perf_counter() - started_s > limit_s:
            break
        times, cluster = problem(KINDS[case % len(KINDS)], 10_000 + case)
        split = allocate(times, cluster)
        ours, theirs = makespan_s(times, split), reference(times, cluster)
        broken += not keeps_the_rules(split, cluster)
        different += abs(ours - theirs) > tolerance * max(1.0, theirs)
        worst = max(worst, abs(ours - theirs) / max(1.0, theirs))
        reached += 1
    return Row(
        f"makespan against {name}",
        f"equal within {tolerance:g} (relative), rules kept",
        {"cases": reached, "different": different, "worst": worst, "rules_broken": broken},
        met=not different and not broken,
    )


def cost(world_size: int, global_batch_size: int, bar_ms: float | None, repeats: int) -> Row:
    """Time decisions on unlike workers, each on costs of its own."""
    cluster, elapsed_ms = Cluster(world_size, global_batch_size), []
    for seed in range(repeats):
        random = np.random.default_rng(seed)
        slope_s = 1e-3 * np.exp(random.uniform(0, np.log(4), world_size))
        times = AffineTime(random.uniform(2e-3, 2e-2, world_size), slope_s)
        started_s = time.perf_counter()
        allocate(times, cluster)
        elapsed_ms.append(1e3 * (time.perf_counter() - started_s))
    median = float(np.median(elapsed_ms))
    return Row(
        f"one decision for {world_size} workers, {global_batch_size} samples, affine",
        "reported" if bar_ms is None else f"median <= {bar_ms:g} ms",
        {"median_ms": median, "p95_ms": float(np.quantile(elapsed_ms, 0.95)), "runs": repeats},
        met=None if bar_ms is None else median <= bar_ms,
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--full", action="store_true", help="no time limit on the integer program")


if __name__ == "__main__":
    main(__doc__ or "", rows, _add_options)
