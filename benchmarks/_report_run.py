"""The file of events of a long run on many ranks, as if it had been trained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np

from evenstep.events import (
    SCHEMA_VERSION,
    Event,
    MeasurementRejected,
    MemoryCapped,
    Rebalanced,
    RunEnded,
    RunStarted,
    StepMeasured,
    StepsAccounted,
    WaitingDiagnosed,
    WorkerLost,
)

SAMPLES_PER_RANK, MODEL_S = 16, 0.012  # of a step, and seconds of a sample on a usual device
PLAN_EVERY = 50


def write_run(path: Path, *, num_steps: int, world_size: int, seed: int = 0) -> None:
    """Write what ``JsonLines`` would: the same text, without a copy of each value."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        file.write(json.dumps({"event": "Schema", "version": SCHEMA_VERSION}) + "\n")
        for event in events(num_steps, world_size, seed):
            record = {"event": type(event).__name__}
            record |= {field.name: getattr(event, field.name) for field in fields(event)}
            file.write(json.dumps(record) + "\n")


def events(num_steps: int, world_size: int, seed: int) -> Iterator[Event]:
    """Yield the events of a run in which ranks are slow for reasons of their own.

    Every eighth has an older device. The second one gets hot, so that it slows down over the run.
    The last one reads from a slow disk in the third quarter. All others are disturbed at times.
    Half way a worker is lost, and training begins again.
    """
    rng = np.random.default_rng(seed)
    total = SAMPLES_PER_RANK * world_size
    equal = np.full(world_size, SAMPLES_PER_RANK)
    sizes, epoch, wall_s = equal, 0, 0.0
    yield _start(num_steps, world_size, total)
    yield MemoryCapped(1, 0, 3 * SAMPLES_PER_RANK, 80 * 2**30)
    for step in range(num_steps):
        slope_s = _slope_s(step / num_steps, world_size, rng)
        best = _apportioned(total, 1 / slope_s)
        if step and step % PLAN_EVERY == 0 and (best != sizes).any():
            sizes, epoch = best, epoch + 1
            reason = f"slowest {slope_s.max() / slope_s.min():.2f} times the fastest"
            yield Rebalanced(step, epoch, tuple(sizes.tolist()), reason)
        compute_s = sizes * slope_s
        makespan_s = float(compute_s.max())
        account = _account(step, num_steps, compute_s, rng)
        yield StepMeasured(
            step=step,
            plan_epoch=epoch,
            batch_size=tuple(sizes.tolist()),
            compute_s=tuple(compute_s.tolist()),
            data_s=account.input_s,
            idle_s=tuple((makespan_s - compute_s).tolist()),
            makespan_s=makespan_s,
            idle_share=float((makespan_s - compute_s).sum() / world_size / makespan_s),
            equal_split_s=float((equal * slope_s).max()) if step else None,
            best_split_s=float((best * slope_s).max()) if step else None,
            wall_s=wall_s if step else None,
        )
        wall_s = account.wall_s[0]
        yield account
        yield from _seldom(step, num_steps, world_size, wall_s, total)
    yield RunEnded(num_steps)


def _start(num_steps: int, world_size: int, total: int) -> RunStarted:
    hosts = tuple(f"node{rank // 8:02d}" for rank in range(world_size))
    devices = tuple(
        f"cuda:{rank % 8} NVIDIA {'V100' if rank % 8 == 7 else 'A100'}"
        for rank in range(world_size)
    )
    return RunStarted(world_size, total, num_steps, "Auto(overhead=0.0)", hosts, devices)


def _slope_s(progress: float, world_size: int, rng: np.random.Generator) -> np.ndarray:
    slope_s = MODEL_S * rng.gamma(900, 1 / 900, world_size)
    slope_s[7::8] *= 1.8
    slope_s[1] *= 1 + progress
    at = np.arange(world_size)
    slope_s[np.sin(40 * progress + at) > 0.99] *= 1.3
    return slope_s


def _account(
    step: int, num_steps: int, compute_s: np.ndarray, rng: np.random.Generator
) -> StepsAccounted:
    world_size = len(compute_s)
    input_s = rng.gamma(4, 0.0002, world_size)
    if 0.5 < step / num_steps < 0.75:
        input_s[-1] += 0.08
    arrived_s = compute_s + input_s
    spent = {
        "input_s": input_s,
        "forward_s": compute_s / 3,
        "backward_s": compute_s * 2 / 3,
        "communication_s": np.full(world_size, rng.gamma(50, 0.0004)),
        "waiting_s": arrived_s.max() - arrived_s,
        "optimizer_s": rng.gamma(50, 0.0001, world_size),
        "evaluation_s": np.full(world_size, 20.0 if step % 5000 == 4999 else 0.0),
        "checkpoint_s": np.full(world_size, 3.0 if step % 1000 == 999 else 0.0),
        "rest_s": rng.gamma(4, 0.0005, world_size),
    }
    spent = {name: np.round(value * 1e6) / 1e6 for name, value in spent.items()}
    wall_s = np.round(sum(spent.values()) * 1e6) / 1e6
    lists = {name: tuple(value.tolist()) for name, value in spent.items()}
    return StepsAccounted(step=step, num_steps=1, wall_s=tuple(wall_s.tolist()), **lists)


def _seldom(
    step: int, num_steps: int, world_size: int, step_s: float, total: int
) -> Iterator[Event]:
    """Yield what does not happen in every step."""
    if step % 200 == 199:
        late = 0.5 < step / num_steps < 0.75
        yield WaitingDiagnosed(
            step=step,
            num_steps=200,
            step_s=step_s,
            waiting_share=0.12,
            explained_share=0.91,
            causes=("input", "throttling") if late else ("throttling",),
            ranks=(world_size - 1, 1) if late else (1,),
            lost_share=(0.06, 0.03) if late else (0.04,),
            evidence=("80 ms of input in every step", "18 % slower")[0 if late else 1 :],
            remedy=("more loader workers, or a faster disk", "cool it, or cap its power")[
                0 if late else 1 :
            ],
        )
    if step % 10_000 == 77:
        yield MeasurementRejected(step, 3, "compute_s is nan")
    if step == num_steps // 2:
        yield WorkerLost(step, world_size // 2, f"node{world_size // 16:02d}", "silent for 60 s")
        yield _start(num_steps, world_size, total)


def _apportioned(total: int, speed: np.ndarray) -> np.ndarray:
    """Return whole shares of ``total`` in proportion to ``speed``."""
    ideal = total * speed / speed.sum()
    sizes = ideal.astype(np.int64)
    sizes[np.argsort(sizes - ideal, kind="stable")[: total - sizes.sum()]] += 1
    return sizes
