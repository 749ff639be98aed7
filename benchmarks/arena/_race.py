"""One rank of a race: contestants in turns, on clocks of their own."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from math import inf
from statistics import median
from time import process_time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.arena._papers import SETUPS
from benchmarks.arena._setups import ArenaSetUp
from benchmarks.arena._tasks import accuracy
from benchmarks.arena._world import SNAPSHOT_S, World, flat
from benchmarks.arena.contestants import contestants


@dataclass(slots=True)
class Runner:
    """A contestant under way on one rank.

    Attributes:
        world: what it trains in.
        steps: ends with each of its steps.
        turns: seconds of the clock, steps, and this rank's CPU seconds of every turn.
    """

    world: World
    steps: Generator[None]
    turns: list[tuple[float, int, float]]


def race(
    rank: int,
    setup_name: str,
    entries: tuple[tuple[str, int], ...],
    duration_s: float,
    turn_s: float,
) -> list[dict[str, Any]]:
    """Let contestants train for ``duration_s`` each, ``turn_s`` at a time.

    Args:
        rank: this worker, or the server.
        setup_name: of the machines.
        entries: name and seed of each contestant.
        duration_s: seconds that each trains.
        turn_s: seconds of a turn.

    Returns:
        Figures of each entry, the same on all ranks.
    """
    setup = SETUPS[setup_name]
    entered = contestants(setup)
    runners = []
    for name, seed in entries:
        # What exact ones learn is known from one process.
        snapshot_s = inf if entered[name].is_exact else SNAPSHOT_S
        world = World(setup, rank, seed=seed, duration_s=duration_s, snapshot_s=snapshot_s)
        runners.append(Runner(world, entered[name].train(world), []))
        next(runners[-1].steps)  # ready
    for turn in range(round(duration_s / turn_s)):
        for number in np.roll(np.arange(len(runners)), -turn):  # another one is first
            take_turn(runners[number], (turn + 1) * turn_s)
    found = [figures(setup, runner) for runner in runners]
    for runner in runners:
        runner.steps.close()
    return found


def take_turn(runner: Runner, until_s: float) -> None:
    """Train until the clock is nearest to ``until_s``.

    All ranks take as many steps as the one that could take fewest: those that stay out of a
    contestant could take any number.
    """
    clock, num_steps = runner.world.clock, 0
    dist.barrier()
    began_s, cpu_s = clock.now_s, process_time()
    clock.start()
    while more := _agreed(steps_until(until_s, clock.now_s, began_s, num_steps)):
        for _ in range(more):
            next(runner.steps, None)
        num_steps += more
    clock.stop()
    runner.turns.append((clock.now_s - began_s, num_steps, process_time() - cpu_s))


def steps_until(until_s: float, now_s: float, began_s: float, num_steps: int) -> int:
    """Return how many steps to take before looking again, 0 at the end of a turn.

    At first one, to see how long it takes; then half of those that fit, as they may take longer.
    """
    if not num_steps:
        return 1
    mean_s = (now_s - began_s) / num_steps
    fitting = (until_s - now_s) / mean_s
    return max(1, int(fitting / 2)) if fitting > 0.5 else 0


def _agreed(value: int) -> int:
    least = torch.tensor([value])
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return int(least)


def figures(setup: ArenaSetUp, runner: Runner) -> dict[str, Any]:
    """Return what is known of a contestant on all ranks; seconds are of its clock.

    Turns, updates and accuracies are those of the first rank that updated the model.
    """
    device = runner.world.device
    mine = {
        "cpu_s": round(sum(cpu_s for *_, cpu_s in runner.turns), 3),
        "slept_s": round(device.slept_s, 3),
        "late_ms": [round(1e3 * part, 2) for part in _median_and_p95(device.late_s)],
    }
    each = _gathered(mine)
    has_log = _gathered(bool(runner.world.log.updates))
    told = _gathered(_course(runner) if has_log.index(True) == dist.get_rank() else {})
    workers = each[: setup.world_size]
    return {**max(told, key=len), **{key: [one[key] for one in workers] for key in mine}}


def _course(runner: Runner) -> dict[str, Any]:
    log, model = runner.world.log, runner.world.network()
    return {
        "turns": [{"seconds": round(s, 4), "steps": steps} for s, steps, _ in runner.turns],
        "num_samples": log.updates[-1][1],
        "updates_s": [round(now_s, 3) for now_s, _ in log.updates],
        "accuracy": [
            [round(now_s, 3), round(accuracy(model, parameters), 4)]
            for now_s, parameters in log.snapshots
        ],
    }


def _gathered(mine: Any) -> list[Any]:
    each: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(each, mine)
    return each


def _median_and_p95(values: list[float]) -> tuple[float, float]:
    if not values:
        return 0.0, 0.0
    return median(values), float(np.quantile(values, 0.95))


def one_process(setup_name: str, seed: int, num_steps: int) -> list[float]:
    """Return the accuracy after every step that one process takes on whole global batches."""
    setup = SETUPS[setup_name]
    world = World(setup, 0, seed=seed, duration_s=num_steps * setup.step_s(setup.equal))
    model, judged = world.network(), world.network()
    optimizer = world.optimizer(model)
    found = []
    for step in range(num_steps):
        first = step * setup.global_batch_size
        world.loss(model, first, setup.global_batch_size).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(accuracy(judged, flat(model)))
    return found
