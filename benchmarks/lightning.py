"""Lightning, balanced by one callback: how near the optimum, and where its own example ends.

``--scripts DIR`` is a folder with a clone of Lightning-AI/pytorch-lightning, whose example is run
plain and balanced; nothing is fetched.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks import _lightning_runs as runs
from benchmarks._common import Row, main, progress
from evenstep import AffineTime, Cluster, allocate
from evenstep.testing import run_workers

SLOPE_S = 0.035 / np.array([1.0, 2.0, 4.0])  # the optimum of 42 rows is 210 ms


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Answer with every bar in turn."""
    yield from speeds(20 if options.quick else 50)
    if options.scripts is not None:
        yield from example((options.scripts / runs.EXAMPLE).read_text("utf-8"))


def speeds(num_steps: int) -> Iterator[Row]:
    """Measure the median batch against the best that these speeds allow."""
    world_size = len(SLOPE_S)
    times = AffineTime(np.zeros(world_size), SLOPE_S)
    best = allocate(times, Cluster(world_size, runs.BATCH_SIZE * world_size))
    optimum_s = float(times.seconds(best).max())
    for what, logs, accumulated in (
        ("as it is", False, 1),
        ("2 batches accumulated", False, 2),
        ("the loss logged on every step with `sync_dist`", True, 1),
    ):
        progress(f"{num_steps} steps, {what}")
        found = run_workers(
            world_size, runs.seconds, SLOPE_S.tolist(), num_steps, logs, accumulated
        )
        taken, sizes = found[0]
        ratio = runs.middle(taken) / optimum_s
        yield Row(
            what=f"Lightning, {what}: 3 sleeping workers, speeds 1 : 2 : 4",
            bar="median batch after the fifth <= 1.10 x the optimum",
            measured={
                "ratio": ratio,
                "median_step_s": runs.middle(taken),
                "optimum_s": optimum_s,
                "equal_split_s": float(times.seconds(np.full(3, runs.BATCH_SIZE)).max()),
                "batch_size": sizes,
                "first_steps_s": taken[:5],
            },
            met=ratio <= 1.10,
        )


def example(text: str) -> Iterator[Row]:
    """Count the changed lines of Lightning's example, and compare where it ends."""
    ours = runs.balanced_text(text)
    diff = list(difflib.unified_diff(text.splitlines(), ours.splitlines(), n=0))[2:]
    changed = sum(line.startswith("+") for line in diff)
    yield Row(
        what=f"{runs.EXAMPLE}: lines changed",
        bar="<= 5",
        measured={"lines": changed},
        met=changed <= 5,
    )
    progress("Lightning's example, plain and balanced")
    plain, _ = run_workers(2, runs.example, text, False)[0]
    balanced, sizes = run_workers(2, runs.example, text, True)[0]
    distance = float((balanced - plain).norm() / plain.norm())
    yield Row(
        what="the same, in double precision without dropout: 2 ranks, split 3 : 1",
        bar="parameters within 1e-9 of plain training",
        measured={"distance": distance, "batch_size": sizes},
        met=distance <= 1e-9 and len(set(sizes)) == 2,
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add where the script is."""
    parser.add_argument("--scripts", type=Path, help="a folder with a clone of the repository")


if __name__ == "__main__":
    main(__doc__, rows, add_options)
