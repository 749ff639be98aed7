"""Whether a long run stays what it was: memory, handles, threads and the pace of the exchange.

Two processes train a tiny model for very many balanced steps over many epochs, with jittered
times that keep the policy moving. Figures are taken at even intervals; the first tenth warms up.
"""

from __future__ import annotations

import argparse
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._common import Row, main, progress
from evenstep.testing import run_workers
from evenstep.torch import Balancer, Runtime

NUM_READINGS = 50
STEPS_OF_EPOCH = 500


def train(rank: int, num_steps: int, run_dir: str) -> list[dict[str, float]]:
    """Return this process's figures at even intervals of the run."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Linear(4, 1)
    data = TensorDataset(torch.randn(16 * STEPS_OF_EPOCH, 4), torch.randn(16 * STEPS_OF_EPOCH, 1))
    loader: Any = DataLoader(data, batch_size=8, shuffle=True)
    readings = []
    with Balancer(runtime=Runtime(line_every=None, run_dir=run_dir)) as balancer:
        net, loader = balancer.prepare(model, loader)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        step, began_s = 0, perf_counter()
        while step < num_steps:
            for x, y in loader:
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                if step % max(num_steps // NUM_READINGS, 1) == 0:
                    now_s = perf_counter()
                    readings.append({"step": step, "seconds": now_s - began_s, **_figures()})
                    began_s = now_s
                    if rank == 0 and step % max(num_steps // 10, 1) == 0:
                        progress(f"step {step:,} of {num_steps:,}")
                if step == num_steps:
                    break
    return readings


def _figures() -> dict[str, float]:
    """Return what this process holds: resident bytes, open files, threads."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "resident_bytes": float(pages * os.sysconf("SC_PAGE_SIZE")),
        "handles": float(len(os.listdir("/proc/self/fd"))),
        "threads": float(threading.active_count()),
    }


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Train, and compare the last fifth of the run with the second."""
    num_steps = 5_000 if options.quick else options.steps
    with TemporaryDirectory() as folder:
        ranks = run_workers(2, train, num_steps, folder, timeout_s=3600)
    for rank, readings in enumerate(ranks):
        early = readings[NUM_READINGS // 5 : 2 * NUM_READINGS // 5]
        late = readings[-NUM_READINGS // 5 :]

        def grown(name: str, early: Any = early, late: Any = late) -> float:
            return median(r[name] for r in late) / median(r[name] for r in early)

        yield Row(
            what=f"{num_steps:,} balanced steps of a tiny model, rank {rank}",
            bar="memory flat within 2 %, no leaked handle or thread, no drift of the step time",
            measured={
                "memory_late_over_early": grown("resident_bytes"),
                "resident_mb": median(r["resident_bytes"] for r in late) / 1e6,
                "handles_early_late": (early[0]["handles"], late[-1]["handles"]),
                "threads_early_late": (early[0]["threads"], late[-1]["threads"]),
                "step_time_late_over_early": grown("seconds"),
                "step_ms": 1e3 * median(r["seconds"] for r in late) * NUM_READINGS / num_steps,
            },
            met=(
                abs(grown("resident_bytes") - 1) <= 0.02
                and late[-1]["handles"] <= early[0]["handles"]
                and late[-1]["threads"] <= early[0]["threads"]
            ),
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the number of steps."""
    parser.add_argument("--steps", type=int, default=100_000, help="balanced steps")


if __name__ == "__main__":
    main(__doc__, rows, add_options)
