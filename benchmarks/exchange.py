"""What the exchange and the decision cost.

Exposed: what the plan point of a real training loop waits for its plan, the slowest rank of each
step. It leaves out what the exchange adds inside the backward; for that, `equal_workers` compares
whole steps. With nothing to hide behind: all ranks start together, report a step and wait for the
next plan, where in training the all-reduce and the optimizer would run meanwhile.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from statistics import median, quantiles
from time import perf_counter, sleep

import torch
import torch.distributed as dist

from benchmarks._common import Row, main, progress
from benchmarks._sleepers import loader_of, sleeper
from evenstep.control import Job, Plan, Planner, Report
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
    """Return seconds that each plan point of a training loop waited for its plan.

    Real DDP steps whose forward sleeps for 20 ms; the report has gone out in the backward.
    """
    world_size = dist.get_world_size()
    model = sleeper(0.0, 0.02 / 8, width=256)
    optimizer = torch.optim.AdamW(model.parameters())
    seconds: list[float] = []
    with Balancer(policy=policy, runtime=Runtime(line_every=None)) as balancer:
        model, loader = balancer.prepare(model, loader_of(num_steps, 8, world_size, width=256))
        for step, (x,) in enumerate(loader):
            if step == 0:
                _time_plan_point(balancer, seconds)
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return seconds


def _time_plan_point(balancer: Balancer, seconds: list[float]) -> None:
    exchange = balancer._link._run.exchange  # type: ignore[union-attr]
    ask = exchange.at

    def at(step: int) -> Plan:
        began_s = perf_counter()
        plan = ask(step)
        seconds.append(perf_counter() - began_s)
        return plan

    exchange.at = at  # type: ignore[method-assign]


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Measure at 2, 4 and 8 ranks."""
    num_steps = 60 if options.quick else 300
    for world_size in (2, 4, 8):
        progress(f"{world_size} ranks")
        loop = run_workers(world_size, in_training, options.policy, num_steps // 2, timeout_s=300)
        exposed = [max(step) for step in zip(*loop, strict=True)][5:]
        each = run_workers(world_size, bare, options.policy, num_steps, timeout_s=300)
        alone = [max(step) for step in zip(*each, strict=True)][10:]
        yield Row(
            what=f"exchange and decision by {options.policy}, {world_size} ranks",
            bar="exposed: median <= 0.5 ms at 2 ranks" if world_size == 2 else "reported",
            measured={
                "exposed_median_ms": 1e3 * median(exposed),
                "exposed_p95_ms": 1e3 * quantiles(exposed, n=20)[-1],
                "nothing_to_hide_behind_median_ms": 1e3 * median(alone),
                "nothing_to_hide_behind_p95_ms": 1e3 * quantiles(alone, n=20)[-1],
            },
            met=median(exposed) <= 0.5e-3 if world_size == 2 else None,
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the choice of a policy."""
    parser.add_argument("--policy", default="auto", help="by name")


if __name__ == "__main__":
    main(__doc__, rows, add_options)
