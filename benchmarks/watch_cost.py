"""What ``evenstep watch`` costs a rank: CPU seconds of a step with a watch against those without.

Two ranks train a small model whose forward sleeps for as long as a step of 100 ms lasts, with and
without a watch in turn, some seconds at a time in the same processes. CPU time of the process has
all in it: hooks on the thread that trains, and the watch's own thread, which on rank 0 makes the
diagnosis. Beside it stands what the watch itself counts of its time.
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
STEP_S, NUM_STEPS = 0.1, 50  # as long as the watch's thread sleeps: it wakes up once in them
MOST = 0.002  # of a step


def run(num_rounds: int) -> dict[int, dict[str, Any]]:
    """Return what each rank measured."""
    paths = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "benchmarks._watch_cost_run"]
    done = subprocess.run(
        [*command, str(num_rounds), str(NUM_STEPS), str(STEP_S)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {one["rank"]: one for one in told}


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Compare the two, rank by rank."""
    num_rounds = 3 if options.quick else 18
    progress(f"{2 * num_rounds} rounds of {(NUM_STEPS + 3) * STEP_S:.0f} s")
    for rank, found in sorted(run(num_rounds).items()):
        more_s = np.array(found["watched"]) - np.array(found["plain"])
        low_s, high_s = bootstrap_median(more_s)
        own_s = np.array(found["inline"]) + np.array(found["thread"])
        share = median(more_s) / STEP_S
        yield Row(
            f"rank {rank}: CPU seconds of a step of {STEP_S * 1e3:g} ms, watched over plain",
            f"at most {100 * MOST:g} % of the step",
            {
                "percent": 100 * share,
                "more_us": median(more_s) * 1e6,
                "interval_us": (low_s * 1e6, high_s * 1e6),
                "own_accounting_us": median(own_s) * 1e6,
                "own_inline_us": median(found["inline"]) * 1e6,
                "own_thread_us": median(found["thread"]) * 1e6,
                "plain_cpu_us": median(found["plain"]) * 1e6,
                "bytes_per_step": median(found["bytes"]),
            },
            share <= MOST,
        )


if __name__ == "__main__":
    main(__doc__ or "", rows)
