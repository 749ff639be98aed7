"""What the exchange and the decision cost.

Exposed: by how much a balanced step outlasts a plain DDP step beside it, from the start of the
backward to the next plan. With nothing to hide behind: all ranks start together, report a step
and wait for the next plan, where in training the all-reduce and the optimizer run meanwhile.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from statistics import median, quantiles
from time import perf_counter, sleep

import torch
import torch.distributed as dist

from benchmarks._common import Row, main, progress
from benchmarks._sleepers import loader_of, sleeper
from evenstep._exchange._exchange import Exchange
from evenstep._exchange._message_kinds import StepReports
from evenstep._planner import Bounds, Job, Plan, Planner, Report
from evenstep._run._open_channel import open_channel
from evenstep.policies import by_name
from evenstep.testing import run_workers
from evenstep.torch import Balancer, Runtime
from evenstep.torch._exchange._side_group import open_side
from evenstep.torch._exchange._startup import WorkerFacts, addresses_of, gather_facts
from evenstep.torch._exchange._stuck import TORCH


def bare(rank: int, policy: str, num_steps: int) -> list[float]:
    """Return seconds from the report of each step to its plan, all ranks starting together."""
    side = open_side(None)
    facts = gather_facts(side, WorkerFacts.here(torch.device("cpu"), lag=0))
    channel = open_channel(side, Runtime(), addresses_of(facts))
    hosts = [worker.host for worker in facts]
    exchange = Exchange(rank, hosts, channel, framework=TORCH, emit=lambda event: None)
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
        report = Report(step, size, 32 * side.world_size, compute_s, 0.0)
        exchange.report(step, partial(tuple, [StepReports(step, (report,))]))
        plan = exchange.at(step + 1)
        seconds.append(perf_counter() - began_s)
    dist.barrier()
    exchange.close()
    return seconds


def in_training(rank: int, policy: str, num_steps: int) -> list[tuple[float, float]]:
    """Return seconds of each step of plain DDP and of the balanced step beside it.

    From the start of the backward, in whose end the report goes out, to the end of the optimizer
    step, and what the plan point then waited for its plan: where anything can be exposed. Steps
    of 20 ms take turns.
    """
    world_size = dist.get_world_size()
    models = [sleeper(0.0, 0.02 / 8, width=256) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    loaders = [loader_of(num_steps, 8, share, width=256) for share in (1, world_size)]
    seconds: list[list[float]] = [[], []]
    waits: list[float] = []
    # Held at the equal split: unequal ones would wait for each other, which is not what is asked.
    held, runtime = Bounds(min=8, max=8), Runtime(line_every=None)
    with Balancer(policy=policy, bounds=held, runtime=runtime) as balancer:
        models[1], loaders[1] = balancer.prepare(models[1], loaders[1])
        for step, batches in enumerate(zip(*loaders, strict=True)):
            if step == 0:
                _time_plan_points(balancer, waits)
            for which in (0, 1) if step % 2 else (1, 0):
                dist.barrier()
                loss = models[which](batches[which][0]).mean()
                began_s = perf_counter()
                loss.backward()
                optimizers[which].step()
                optimizers[which].zero_grad()
                seconds[which].append(perf_counter() - began_s)
    plain, ours = seconds
    return [(p, o + wait) for p, o, wait in zip(plain, ours, waits, strict=False)]


def _time_plan_points(balancer: Balancer, seconds: list[float]) -> None:
    """Have every plan point from now on add to ``seconds`` what it waits."""
    exchange = balancer._session.exchange  # type: ignore[union-attr]
    ask = exchange.at

    def at(step: int, **how: bool) -> Plan:
        began_s = perf_counter()
        plan = ask(step, **how)
        seconds.append(perf_counter() - began_s)
        return plan

    exchange.at = at  # type: ignore[method-assign]


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Measure at 2, 4 and 8 ranks."""
    num_steps = 60 if options.quick else 300
    for world_size in (2, 4, 8):
        progress(f"{world_size} ranks")
        loop = run_workers(world_size, in_training, options.policy, num_steps, timeout_s=300)
        exposed = [_exposed_s(step) for step in zip(*loop, strict=True)][5:]
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


def _exposed_s(step: tuple[tuple[float, float], ...]) -> float:
    """Return by how much the slowest rank's balanced step outlasts the slowest plain one."""
    plain, ours = zip(*step, strict=True)
    return max(ours) - max(plain)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the choice of a policy."""
    parser.add_argument("--policy", default="auto", help="by name")


if __name__ == "__main__":
    main(__doc__, rows, add_options)
