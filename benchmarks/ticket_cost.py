"""What the machinery of a step costs, beside another checkout of evenstep.

Two workers with steps of 5 ms that sleep train with both, and with plain DDP, in the same
processes: they take turns, 25 steps at a time. Several runs, as each has places in memory and ports
of its own. Without `--against` there are only the seconds that balanced steps take more than plain
ones.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._common import Row, main, progress
from benchmarks.equal_workers import bootstrap_median

ROOT = Path(__file__).parents[1]
OTHER = "evenstep_before"


def run_once(packages: dict[str, str], num_turns: int, step_s: float) -> dict[str, Any]:
    """Return what ``_ticket_run`` measures with the evensteps in some folders."""
    paths = os.pathsep.join((packages["evenstep"], str(ROOT)))
    numbers = (str(num_turns), str(step_s))
    command = [sys.executable, "-m", "benchmarks._ticket_run", json.dumps(packages), *numbers]
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Compare this checkout with the other, block by block."""
    packages = {"evenstep": str(ROOT / "src")}
    if options.against is not None:
        packages[OTHER] = str(options.against.resolve())
    num_runs, num_turns = (1, 6) if options.quick else (options.runs, options.turns)
    runs = []
    for number in range(num_runs):
        progress(f"run {number + 1} of {num_runs}")
        runs.append(run_once(packages, num_turns, options.step_s))

    def seconds(name: str, clock: str = "wall_s") -> np.ndarray:
        return np.array([run[name][clock] for run in runs])

    for name, whose in zip(packages, ("this", "other"), strict=False):
        more_s = (seconds(name) - seconds("plain")).ravel()
        more_cpu_s = (seconds(name, "cpu_s") - seconds("plain", "cpu_s")).ravel()
        yield Row(
            f"{whose} checkout: balanced steps over plain ones of {options.step_s * 1e3:g} ms",
            "reported",
            {
                "median_more_s": float(np.median(more_s)),
                "limits_95_s": bootstrap_median(more_s),
                "median_more_cpu_s": float(np.median(more_cpu_s)),
            },
        )
    if options.against is not None:
        yield compare(*(seconds("evenstep", of) / seconds(OTHER, of) for of in ("wall_s", "cpu_s")))


def compare(ratios: np.ndarray, of_cpu: np.ndarray) -> Row:
    """Return the row of this checkout's steps over the other's, ``(num_runs, num_turns)``."""
    return Row(
        "this checkout's step over the other's",
        "median <= 1.01",
        {
            "median": float(np.median(ratios)),
            "limits_95": bootstrap_median(ratios.ravel()),
            "median_of_each_run": np.median(ratios, axis=1).tolist(),
            "of_cpu_seconds": float(np.median(of_cpu)),
            "blocks": ratios.size,
        },
        met=bool(np.median(ratios) <= 1.01),
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the other checkout, and how long to measure."""
    parser.add_argument("--against", type=Path, help="`src` of another checkout, to compare with")
    parser.add_argument("--runs", type=int, default=6, help="runs, each in processes of its own")
    parser.add_argument("--turns", type=int, default=60, help="blocks of each kind in a run")
    parser.add_argument("--step-s", type=float, default=0.005, help="seconds of a step")


if __name__ == "__main__":
    main(__doc__.splitlines()[0], rows, add_options)
