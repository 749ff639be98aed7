"""The demo as a person starts it: how near the limit, and whether it trains the same."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks._common import Row, main, progress


def run_demo(out: Path, num_steps: int | None) -> tuple[dict[str, Any], float]:
    """Run ``evenstep demo`` and return its figures and its seconds from beginning to end."""
    command = [sys.executable, "-m", "evenstep.cli", "demo", "--out", str(out)]
    if num_steps is not None:
        command += ["--steps", str(num_steps)]
    began_s = perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    total_s = perf_counter() - began_s
    if done.returncode:
        raise RuntimeError(f"the demo ended with code {done.returncode}:\n{done.stdout}")
    return json.loads((out / "summary.json").read_text()), total_s


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Run it once, on four emulated workers of speeds 1 : 1/2 : 1/3 : 1/6."""
    num_steps = 20 if options.quick else None
    progress("the demo: two runs on four workers, under two minutes")
    with tempfile.TemporaryDirectory() as folder:
        figures, total_s = run_demo(Path(folder) / "demo", num_steps)
    equal, balanced = figures["equal"], figures["balanced"]
    yield Row(
        what=f"the demo's balanced run, {figures['num_steps']} steps",
        bar="(B / summed speeds) / median step >= 0.90",
        measured={
            "share_of_limit": figures["share_of_limit"],
            "limit_s": figures["limit_s"],
            "balanced_step_s": balanced["step_s"],
            "equal_step_s": equal["step_s"],
            "speed_up": figures["speed_up"],
            "idle_share": (equal["idle_share"], balanced["idle_share"]),
            "batch_size": balanced["batch_size"],
            "late_share": figures["late_share"],
        },
        met=figures["share_of_limit"] >= 0.90,
    )
    yield Row(
        what="largest difference between the losses, step by step",
        bar="balanced against equal split <= 1e-4",
        measured={
            "equal_to_balanced": figures["loss_difference"],
            "final_loss": (equal["final_loss"], balanced["final_loss"]),
        },
        met=figures["loss_difference"] <= 1e-4,
    )
    yield Row(
        what="the command from beginning to end, set-up of the environment apart",
        bar="< 120 s",
        measured={"total_s": total_s},
        met=total_s < 120,
    )


if __name__ == "__main__":
    main(__doc__, rows)
