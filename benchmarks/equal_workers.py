"""What balancing costs where there is nothing to balance: two equal workers against plain DDP.

Three models take turns, step by step, in the same processes: plain DDP, balanced DDP, and plain
DDP once more, each with a stock loader of its own; the balanced one has it prepared. The order
rotates, so that no one always follows the same neighbour.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch.distributed as dist

from benchmarks._common import Row, bootstrap_median, main, progress
from benchmarks._sleepers import Sleeper, loader_of
from evenstep.testing import run_workers
from evenstep.torch import Balancer, Runtime

BATCH_SIZE = 32
STEP_S = 0.060
# Gradients of 16 KB and of 1 MB: the less there is to reduce, the less the exchange hides behind.
WIDTHS = (64, 512)
NAMES = ("plain", "balanced", "plain again")


def train(rank: int, num_rounds: int, width: int) -> tuple[dict[str, list[float]], Any]:
    """Return seconds of every counted step by contestant, and the last batch sizes."""
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.optim import SGD

    warm_up = 10
    models = {name: DDP(Sleeper(0.0, STEP_S / BATCH_SIZE, width=width)) for name in NAMES}
    loaders: dict[str, Any] = {
        name: loader_of(num_rounds + warm_up, BATCH_SIZE, 2, width=width) for name in NAMES
    }
    for name in ("plain", "plain again"):  # a plain rank reads its own half
        loaders[name] = loader_of(num_rounds + warm_up, BATCH_SIZE, 1, width=width)
    balancer = Balancer(runtime=Runtime(line_every=None))
    models["balanced"], loaders["balanced"] = balancer.prepare(
        models["balanced"], loaders["balanced"]
    )
    optimizers = {name: SGD(models[name].parameters(), lr=0.0) for name in NAMES}
    batches = {name: iter(loaders[name]) for name in NAMES}

    def step(name: str) -> float:
        dist.barrier()
        began_s = perf_counter()
        (x,) = next(batches[name])
        models[name](x).mean().backward()
        optimizers[name].step()
        optimizers[name].zero_grad()
        return perf_counter() - began_s

    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    for turn in range(num_rounds + warm_up):
        for shift in range(len(NAMES)):
            name = NAMES[(turn + shift) % len(NAMES)]
            taken_s = step(name)
            if turn >= warm_up:
                seconds[name].append(taken_s)
    sizes = balancer.batch_sizes
    batches.clear()
    balancer.close()
    return seconds, sizes


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Compare pair by pair, for a small and a larger gradient."""
    num_rounds = 30 if options.quick else options.rounds
    for width in WIDTHS:
        progress(f"{num_rounds} rounds of three steps of {STEP_S * 1e3:.0f} ms, width {width}")
        yield compare(num_rounds, width)


def compare(num_rounds: int, width: int) -> Row:
    """Return the row of one size of gradient."""
    seconds, sizes = run_workers(2, train, num_rounds, width, timeout_s=600)[0]
    plain, ours, again = (np.array(seconds[name]) for name in NAMES)
    ratios = (ours / plain) / (again / plain)
    low, high = bootstrap_median(ratios)
    plain_low, plain_high = bootstrap_median(again / plain)
    return Row(
        what=f"two equal workers, {num_rounds} rounds, {width * width // 256} KB gradient",
        bar="(ours / plain) / (plain / plain): median <= 1.01, upper 95 % limit <= 1.02",
        measured={
            "median": median(ratios),
            "limits_95": (low, high),
            "plain_to_plain": median(again / plain),
            "plain_to_plain_limits_95": (plain_low, plain_high),
            "median_step_s": {name: median(seconds[name]) for name in NAMES},
            "batch_size": sizes,
        },
        met=median(ratios) <= 1.01 and high <= 1.02,
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the number of rounds."""
    parser.add_argument("--rounds", type=int, default=150, help="interleaved rounds, 100 or more")


if __name__ == "__main__":
    main(__doc__, rows, add_options)
