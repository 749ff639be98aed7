"""How close real steps come to the optimum: four unlike workers, real DDP over gloo."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks._common import Row, main, progress
from benchmarks._sleepers import aligned_all_reduce_s, loader_of, sleeper
from evenstep import AffineTime, Cluster, allocate
from evenstep.testing import run_workers
from evenstep.torch import Balancer, Runtime

SPEEDS = np.array([6.0, 3.0, 2.0, 1.0])
INTERCEPT_S = np.array([0.02, 0.05, 0.01, 0.04])
SLOPE_S = 0.0125 / SPEEDS * 2.0
BATCH_SIZE = 30
WIDTH = 512


def train(rank: int, policy: str, num_steps: int) -> tuple[list[float], list[float], Any]:
    """Return seconds of every step, seconds of aligned all-reduces, and the last sizes."""
    from torch.optim import SGD

    model = sleeper(INTERCEPT_S[rank], SLOPE_S[rank], width=WIDTH)
    optimizer = SGD(model.parameters(), lr=0.0)
    stock = loader_of(num_steps, BATCH_SIZE, len(SPEEDS), width=WIDTH)
    seconds = []
    with Balancer(policy=policy, runtime=Runtime(line_every=None)) as balancer:
        model, loader = balancer.prepare(model, stock)
        began_s = perf_counter()
        for (x,) in loader:
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            now_s = perf_counter()
            seconds.append(now_s - began_s)
            began_s = now_s
        sizes = balancer.batch_sizes
    return seconds, aligned_all_reduce_s(WIDTH), sizes


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Measure ``auto``, and the equal split beside it."""
    num_steps = 20 if options.quick else 51
    world_size = len(SPEEDS)
    cluster = Cluster(world_size, BATCH_SIZE * world_size)
    times = AffineTime(INTERCEPT_S, SLOPE_S)
    best = allocate(times, cluster)
    optimum_s = float(times.seconds(best).max())
    equal_s = float(times.seconds(np.full(world_size, BATCH_SIZE)).max())
    for policy in (options.policy,) if options.policy else ("auto", "equal"):
        progress(f"{num_steps} steps with {policy}")
        seconds, reduce_s, sizes = run_workers(world_size, train, policy, num_steps)[0]
        settled_s, all_reduce_s = median(seconds[4:]), median(reduce_s)
        ratio = settled_s / (optimum_s + all_reduce_s)
        yield Row(
            what=f"4 sleeping workers, speeds 6 : 3 : 2 : 1, unequal intercepts, policy {policy}",
            bar="median of steps 4 to 50 <= 1.04 x (optimum + aligned all-reduce)",
            measured={
                "ratio": ratio,
                "median_step_s": settled_s,
                "first_steps_s": seconds[:5],
                "optimum_s": optimum_s,
                "aligned_all_reduce_s": all_reduce_s,
                "equal_split_s": equal_s,
                "batch_size": sizes,
                "best_batch_size": best.tolist(),
            },
            met=ratio <= 1.04 if policy == "auto" else None,
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the choice of one policy."""
    parser.add_argument("--policy", help="measure this one alone, by name")


if __name__ == "__main__":
    main(__doc__, rows, add_options)
