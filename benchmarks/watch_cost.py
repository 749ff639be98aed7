"""What ``evenstep watch`` costs a rank: CPU seconds of a step with a watch against those without.

Two ranks train a small model whose forward sleeps until a step of 100 ms is over. In each sleep the
machine's caches are lost, more or less from one minute to the next, so blocks of little more than a
second with and without a watch take turns. The watch works on two threads. One is the thread that
trains, where its CPU seconds are what that thread takes more. The other is its own, which does not
wake up in those blocks. Its CPU seconds are read in long blocks, in which it wakes up once for each
line of the watch, with a diagnosis on rank 0. The cost is the sum of both.

Beside it stand what the watch itself counts, wall-clock seconds of the thread that trains and CPU
seconds of its own; and what the whole process takes more, with the watch's own thread added. In it
are the threads that exchange gradients, too: in one step or another they take 2 ms more, with a
watch and without, so it is known to some 0.2 ms only. All three have to be within the bar.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks._common import ROOT, Row, bootstrap_median, environment, main, progress

STEP_S, NUM_STEPS, NUM_LONG = 0.1, 12, 100  # as long as from one line to the next
MOST = 0.002  # of a step


def run(num_rounds: int) -> dict[int, dict[str, Any]]:
    """Return what each rank measured."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "benchmarks._watch_cost_run"]
    with TemporaryDirectory() as launcher_dir:  # where summaries are left
        arguments = (num_rounds, NUM_STEPS, NUM_LONG, STEP_S, launcher_dir)
        done = subprocess.run(
            [*command, *map(str, arguments)],
            env=environment(),
            cwd=ROOT,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {one["rank"]: one for one in told}


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Compare the two, rank by rank."""
    num_rounds = 6 if options.quick else 50
    progress(f"{2 * num_rounds} blocks of {(NUM_STEPS + 5) * STEP_S:.1f} s, and three of 10 s")
    for rank, found in sorted(run(num_rounds).items()):
        thread_us = 1e6 * median(found["thread"])
        more_us = 1e6 * (np.array(found["watched"]) - np.array(found["plain"]))
        all_us = 1e6 * (np.array(found["watched_process"]) - np.array(found["plain_process"]))
        interval_us, all_interval_us = (
            tuple(np.array(bootstrap_median(one)) + thread_us) for one in (more_us, all_us)
        )
        cost_us, process_us = median(more_us) + thread_us, median(all_us) + thread_us
        inline_us = 1e6 * median([*found["inline"], *found["inline_long"]])
        yield Row(
            f"rank {rank}: CPU seconds of a step of {STEP_S * 1e3:g} ms, watched over plain",
            f"at most {100 * MOST:g} % of the step, and by its own accounting",
            {
                "percent": 100e-6 * cost_us / STEP_S,
                "more_us": cost_us,
                "interval_us": interval_us,
                "process_more_us": process_us,
                "process_interval_us": all_interval_us,
                "own_accounting_us": inline_us + thread_us,
                "own_inline_us": inline_us,
                "own_thread_us": thread_us,
                "plain_cpu_us": median(found["plain_process"]) * 1e6,
                "bytes_per_step": median(found["bytes"]),
            },
            max(cost_us, process_us, inline_us + thread_us) <= 1e6 * MOST * STEP_S,
        )


if __name__ == "__main__":
    main(__doc__ or "", rows)
