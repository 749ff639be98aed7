"""Hugging Face's Trainer and Accelerate, balanced: speed, rounding, and what it takes to change."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import _hf_runs as runs
from benchmarks._common import Row, main, progress
from evenstep import AffineTime, Cluster, allocate
from evenstep.policies import Fixed
from evenstep.testing import run_workers

SPEEDS = np.array([1.0, 2.0, 4.0])
SLOPE_S = 0.028 / SPEEDS  # the optimum of 42 rows: 168 ms, long beside a backward
SPLIT = Fixed((6, 12, 24))
EXAMPLES = Path(__file__).parents[1] / "examples"


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Answer with every bar in turn."""
    yield from speeds(20 if options.quick else 50)
    yield from roundings(10 if options.quick else 50)
    yield from changes()


def speeds(num_steps: int) -> Iterator[Row]:
    """Measure the median step against the best that these speeds allow."""
    world_size = len(SPEEDS)
    times = AffineTime(np.zeros(world_size), SLOPE_S)
    best = allocate(times, Cluster(world_size, runs.BATCH_SIZE * world_size))
    optimum_s = float(times.seconds(best).max())
    equal_s = float(times.seconds(np.full(world_size, runs.BATCH_SIZE)).max())
    slopes_s = SLOPE_S.tolist()
    for what, function, arguments in (
        ("Trainer", runs.trainer_seconds, (slopes_s, num_steps, 1)),
        ("Trainer, 2 batches accumulated", runs.trainer_seconds, (slopes_s, num_steps, 2)),
        ("Accelerate", runs.accelerate_seconds, (slopes_s, num_steps)),
    ):
        progress(f"{num_steps} steps with {what}")
        seconds, sizes = run_workers(world_size, function, *arguments)[0]
        ratio = runs.middle(seconds) / optimum_s
        yield Row(
            what=f"{what}: 3 sleeping workers, speeds 1 : 2 : 4",
            bar="median step after the fifth <= 1.10 x the optimum",
            measured={
                "ratio": ratio,
                "median_step_s": runs.middle(seconds),
                "optimum_s": optimum_s,
                "equal_split_s": equal_s,
                "batch_size": sizes,
                "best_batch_size": best.tolist(),
                "first_steps_s": seconds[:5],
            },
            met=ratio <= 1.10,
        )


def roundings(num_steps: int) -> Iterator[Row]:
    """Measure how far parameters are from one process', balanced and plain."""
    size, world_size = runs.BATCH_SIZE, len(SPEEDS)
    for name in runs.TRAINERS:
        progress(f"{num_steps} steps with {name}, three times")
        alone = run_workers(1, runs.parameters, name, None, num_steps, size * world_size)[0]

        def off(options: dict[str, Any] | None, name: str = name, alone: Any = alone) -> float:
            found = run_workers(world_size, runs.parameters, name, options, num_steps, size)[0]
            return float((found - alone).norm() / alone.norm())

        plain, balanced = off(None), off({"policy": SPLIT})
        yield Row(
            what=f"{name}: parameters of a GPT after {num_steps} AdamW steps, split 6 + 12 + 24",
            bar="relative distance from one process <= 3 x that of the plain equal split",
            measured={"ratio": balanced / plain, "balanced": balanced, "plain": plain},
            met=balanced <= 3 * plain,
        )


def changes() -> Iterator[Row]:
    """Count the lines that differ between an example and its plain twin."""
    for name in ("hf_trainer", "accelerate_loop"):
        plain, balanced = (
            (EXAMPLES / file).read_text(encoding="utf-8").splitlines()
            for file in (f"{name}_plain.py", f"{name}.py")
        )
        diff = list(difflib.unified_diff(plain, balanced, lineterm=""))[2:]
        added = [line[1:].strip() for line in diff if line.startswith("+") and line[1:].strip()]
        yield Row(
            what=f"examples/{name}.py beside examples/{name}_plain.py",
            bar="<= 5 changed lines, blank ones not counted",
            measured={"lines": len(added), "they are": added},
            met=len(added) <= 5,
        )


if __name__ == "__main__":
    main(__doc__, rows)
