"""What the exchange and the decision cost, with nothing to hide behind.

All ranks start together, report a step, and wait for the next plan; in training, the all-reduce
and the optimizer run meanwhile, so that this is the most that can be exposed. Beside it: what
the plan point made a real training loop wait for.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from statistics import median, quantiles
from time import perf_counter, sleep

import torch.distributed as dist

from benchmarks._common import Row, main, progress
from benchmarks._sleepers import loader_of, sleeper
from evenstep.control import Job, Planner, Report
from evenstep.policies import by_name
from evenstep.testing import run_workers
from evenstep.torch import Balancer, Runtime
from evenstep.torch._exchange import Exchange
from evenstep.torch._startup import WorkerFacts, gather_facts, open_channel, open_side


def bare(rank: int, policy: str, num_steps: int) -> list[float]:
    """Return seconds from the report of each step to its plan, all ranks starting together."""
    side = open_side(None)
    facts = gather_facts(side, WorkerFacts.here("cpu", lag=0))
    channel = open_channel(side, facts, Runtime())
    hosts = [worker.host for worker in facts]
    exchange = Exchange(rank, hosts, channel, emit=lambda event: None)
    exchange.start()
    if rank == 0:
        exchange.lead(Planner(by_name(policy), Job(side.world_size, 32 * side.world_size)))
    seconds = []
    plan = exchange.at(0)
    for step in range(num_steps):
        size = plan.batch_size[rank]
        sleep(0.005)  # a step, so that nobody's messages pile up
        dist.barrier()
        began_s = perf_counter()
        compute_s = 0.001 * size * (1 + 0.02 * ((step * 7 + rank * 3) % 5))
        exchange.report(step, [Report(step, size, 32 * side.world_size, compute_s, 0.0)])
        plan = exchange.at(step + 1)
        seconds.append(perf_counter() - began_s)
    dist.barrier()
    exchange.close()
    return seconds


def in_training(rank: int, policy: str, num_steps: int) -> list[float]:
    """Return seconds between asking for a batch and having it, in a loop of sleeping steps."""
    world_size = dist.get_world_size()
    model = sleeper(0.0, 0.02 / 8, width=256)
    stock = loader_of(num_steps, 8, world_size, width=256)
    seconds = []
    with Balancer(policy=policy, runtime=Runtime(line_every=None)) as balancer:
        model, loader = balancer.prepare(model, stock)
        batches = iter(loader)
        while True:
            began_s = perf_counter()
            batch = next(batches, None)
            if batch is None:
                return seconds
            seconds.append(perf_counter() - began_s)
            model(batch[0]).mean().backward()


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Measure at 2, 4 and 8 ranks."""
    num_steps = 60 if options.quick else 300
    for world_size in (2, 4, 8):
        progress(f"{world_size} ranks")
        each = run_workers(world_size, bare, options.policy, num_steps, timeout_s=300)
        seconds = [max(step) for step in zip(*each, strict=True)][10:]
        loop = run_workers(world_size, in_training, options.policy, num_steps // 3, timeout_s=300)
        asked = [max(step) for step in zip(*loop, strict=True)][5:]
        yield Row(
            what=f"report to plan by {options.policy}, nothing to hide behind, {world_size} ranks",
            bar="median <= 0.5 ms at 2 ranks" if world_size == 2 else "reported",
            measured={
                "median_ms": 1e3 * median(seconds),
                "p95_ms": 1e3 * quantiles(seconds, n=20)[-1],
                "asking_for_a_batch_in_training_median_ms": 1e3 * median(asked),
            },
            met=median(seconds) <= 0.5e-3 if world_size == 2 else None,
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the choice of a policy."""
    parser.add_argument("--policy", default="auto", help="by name")


if __name__ == "__main__":
    main(__doc__, rows, add_options)
