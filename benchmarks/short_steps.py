"""Steps of a few milliseconds on a machine with fewer cores than workers: times are mostly noise.

There is nothing to balance, so `auto` should stay at equal sizes, decide seldom, and cost next to
nothing more than `Balancer(policy="equal")`. Each contestant trains in processes of its own, in
turns; what plain DDP takes stands beside it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks._common import Row, main, progress
from evenstep.testing import run_workers
from evenstep.torch import Balancer, Runtime

WORLD_SIZE, BATCH_SIZE, WARM_UP = 3, 32, 20
NAMES = ("plain", "equal", "auto")


def train(rank: int, name: str, num_steps: int, width: int) -> tuple[float, list[int]]:
    """Return seconds of a step in the middle of the run, and this rank's sizes."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10)
    )
    num_samples = num_steps * BATCH_SIZE * WORLD_SIZE
    data = TensorDataset(torch.randn(num_samples, 64), torch.randint(0, 10, (num_samples,)))
    if name == "plain":
        sampler = DistributedSampler(data)
        loader: Any = DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler)
        return loop(DistributedDataParallel(model), loader)
    with Balancer(policy=name, runtime=Runtime(line_every=None)) as balancer:
        model, loader = balancer.prepare(model, DataLoader(data, batch_size=BATCH_SIZE))
        return loop(model, loader)


def loop(model: Any, loader: Any) -> tuple[float, list[int]]:
    """Train one epoch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    began_s, sizes = [], []
    for x, y in loader:
        began_s.append(perf_counter())
        sizes.append(len(x))
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    counted = zip(began_s, islice(began_s, 1, None), strict=False)
    return median(after - before for before, after in islice(counted, WARM_UP, None)), sizes


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Compare whole runs, in turns."""
    num_runs = 2 if options.quick else options.runs
    for width in (64, 512):
        step_s: dict[str, list[float]] = {name: [] for name in NAMES}
        at_equal = []
        for number in range(num_runs):
            for shift in range(len(NAMES)):
                name = NAMES[(number + shift) % len(NAMES)]
                progress(f"width {width}, run {number + 1} of {num_runs}: {name}")
                found = run_workers(WORLD_SIZE, train, name, options.steps, width)
                step_s[name].append(found[0][0])
                if name == "auto":
                    at_equal += [size == BATCH_SIZE for size in found[0][1]]
        more = [ours / equal for ours, equal in zip(step_s["auto"], step_s["equal"], strict=True)]
        share = sum(at_equal) / len(at_equal)
        yield Row(
            f"{WORLD_SIZE} equal workers, steps of {1e3 * median(step_s['plain']):.1f} ms",
            "equal sizes in 95 % of the steps; auto takes at most 1.05 times as long as equal",
            {
                "at_equal_sizes": share,
                "auto_over_equal": median(more),
                "spread": (min(more), max(more)),
                "step_s": {name: median(times) for name, times in step_s.items()},
            },
            met=share >= 0.95 and median(more) <= 1.05,
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add how much to run."""
    parser.add_argument("--runs", type=int, default=7, help="runs of each contestant")
    parser.add_argument("--steps", type=int, default=600, help="steps of a run")


if __name__ == "__main__":
    main(__doc__, rows, add_options)
