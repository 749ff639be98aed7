"""What the machinery of a step costs, beside another checkout of evenstep.

Both run in alternation, each in processes of its own: two workers with steps of 5 ms that sleep,
where plain DDP and balanced DDP take turns, 25 steps at a time. Without `--against` there are only
the seconds that balanced steps take more than plain ones.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks._common import Row, main, progress
from benchmarks.equal_workers import bootstrap_median

ROOT = Path(__file__).parents[1]


def run_once(src: Path, num_rounds: int, step_s: float) -> dict[str, Any]:
    """Return what ``_ticket_run`` measures with the evenstep in ``src``."""
    paths = os.pathsep.join((str(src), str(ROOT)))
    command = [sys.executable, "-m", "benchmarks._ticket_run", str(num_rounds), str(step_s)]
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if not Path(found["file"]).is_relative_to(src):
        raise RuntimeError(f"{src} was asked for, and {found['file']} imported: is that a `src`?")
    return found


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Compare this checkout with the other, pair by pair."""
    src = {"this": ROOT / "src"}
    if options.against is not None:
        src["other"] = options.against.resolve()
    num_pairs = 3 if options.quick else options.pairs
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in src}
    for number in range(num_pairs):
        for name in sorted(src, reverse=bool(number % 2)):
            progress(f"{number + 1} of {num_pairs}: {name}")
            found[name].append(run_once(src[name], options.rounds, options.step_s))
    for name, runs in found.items():
        more_s = np.array([run["more_s"] for run in runs])
        yield Row(
            f"{name} checkout: balanced steps over plain ones of {options.step_s * 1e3:g} ms",
            "reported",
            {
                "median_more_s": median(more_s),
                "spread_s": (more_s.min(), more_s.max()),
                "median_more_cpu_s": median(run["more_cpu_s"] for run in runs),
            },
        )
    if "other" in found:
        yield compare(found["this"], found["other"])


def compare(this: list[dict[str, Any]], other: list[dict[str, Any]]) -> Row:
    """Return the row of this checkout's steps over the other's, each over its own plain steps."""
    pairs = list(zip(this, other, strict=True))
    ratios = np.array([a["balanced_s"] / b["balanced_s"] for a, b in pairs])
    drift = np.array([a["plain_s"] / b["plain_s"] for a, b in pairs])
    more_cpu_s = [a["more_cpu_s"] - b["more_cpu_s"] for a, b in pairs]
    low, high = bootstrap_median(ratios / drift)
    return Row(
        "this checkout's step over the other's",
        "median <= 1.01",
        {
            "median": median(ratios / drift),
            "limits_95": (low, high),
            "without_drift_correction": median(ratios),
            "spread": (ratios.min(), ratios.max()),
            "plain_to_plain": median(drift),
            "more_cpu_of_a_step": median(more_cpu_s) / median(b["plain_s"] for _, b in pairs),
            "pairs": len(pairs),
        },
        met=bool(median(ratios / drift) <= 1.01),
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the other checkout, and how long to measure."""
    parser.add_argument("--against", type=Path, help="`src` of another checkout, to compare with")
    parser.add_argument("--pairs", type=int, default=15, help="runs of each checkout")
    parser.add_argument("--rounds", type=int, default=300, help="steps of each kind in a run")
    parser.add_argument("--step-s", type=float, default=0.005, help="seconds of a step")


if __name__ == "__main__":
    main(__doc__, rows, add_options)
