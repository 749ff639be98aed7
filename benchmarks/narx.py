"""NARX against averages and `auto`, by makespan, on recordings of real contention."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._common import Row, main, progress
from evenstep import Cluster, Resources, StepTimings
from evenstep.policies import AbstractPolicy, Auto, Equal, LbBsp2018
from evenstep.prediction import Ema
from evenstep.sim import read_trace

TRACES = Path(__file__).parent / "traces"
FIRST = 200  # forecasts from this step on count
LAGS = 3
EXPLAINS = 0.1  # R^2 that readings add from which on they explain a load
RIVALS: dict[str, AbstractPolicy[Any]] = {
    "narx": LbBsp2018(),
    "ema": LbBsp2018(predictor=Ema()),
    "last value": LbBsp2018(predictor=Ema(1.0)),
    "auto": Auto(),
    "equal": Equal(),
}


def resources_of(path: Path, num_workers: int) -> tuple[np.ndarray, np.ndarray]:
    """Return free CPU and free bytes, ``(num_steps, num_workers)`` each."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    free = np.array([float(row["free_cpu"]) for row in rows]).reshape(-1, num_workers)
    memory = np.array([int(row["free_memory_bytes"]) for row in rows]).reshape(-1, num_workers)
    return free, memory


def gain(speeds: np.ndarray, free: np.ndarray) -> float:
    """Return by how much readings raise the R^2 of forecasts by past speeds, mean of all workers.

    Lines on three past steps, fitted to the first half of what is given and tested on the second.
    """
    logs, told = np.log(speeds), np.log(free + 0.01)
    gains = []
    for speed, share in zip(logs.T, told.T, strict=True):
        past = [np.ones(len(speed) - LAGS), *(_before(speed, lag) for lag in range(LAGS))]
        both = [*past, *(_before(share, lag) for lag in range(LAGS))]
        without, with_readings = (_tested(np.stack(x, axis=1), speed[LAGS:]) for x in (past, both))
        gains.append(with_readings - without)
    return float(np.mean(gains))


def _before(series: np.ndarray, lag: int) -> np.ndarray:
    return series[LAGS - 1 - lag : len(series) - 1 - lag]


def _tested(inputs: np.ndarray, target: np.ndarray) -> float:
    """Return the R^2 on the second half of a line fitted to the first, hardly shrunk."""
    half = len(target) // 2
    known, said = inputs[:half], target[:half]
    square = known.T @ known + 1e-3 * np.eye(inputs.shape[1])
    off = inputs[half:] @ np.linalg.solve(square, known.T @ said) - target[half:]
    return float(1 - (off**2).sum() / ((target[half:] - said.mean()) ** 2).sum())


def makespan(policy: AbstractPolicy[Any], speeds: np.ndarray, spare: list[Resources]) -> float:
    """Return the mean step from step `FIRST` on, over that of the plan that knows the speeds."""
    world_size = speeds.shape[1]
    cluster = Cluster(world_size, 256 * world_size)
    decision, step_s = policy.init(cluster), []
    for speed, resources in zip(speeds, spare, strict=True):
        compute_s = decision.batch_size / speed
        step_s.append(compute_s.max())
        timings = StepTimings(decision.batch_size, compute_s, np.zeros(world_size), resources)
        decision = policy.update(cluster, timings, decision.state)
    best_s = cluster.global_batch_size / speeds.sum(axis=1)
    return float(np.mean(step_s[FIRST:]) / np.mean(best_s[FIRST:]))


def by_makespan(stem: str) -> Row:
    """Return how long steps are under each forecast, replayed.

    What readings explain is known from the steps before those that count.
    """
    speeds = 1 / read_trace(TRACES / f"{stem}.csv").workload.slope_s
    free, memory = resources_of(TRACES / f"{stem}-resources.csv", speeds.shape[1])
    spare = [Resources(*each) for each in zip(free, memory, strict=True)]
    found = {name: makespan(policy, speeds, spare) for name, policy in RIVALS.items()}
    explained = gain(speeds[:FIRST], free[:FIRST])
    first = found["narx"] <= min(found["ema"], found["last value"])
    is_explained = explained >= EXPLAINS
    return Row(
        f"makespan, {stem}: {len(speeds)} steps of {speeds.shape[1]} workers",
        "first against ema and last value" if is_explained else "<= 1.02 times auto",
        {"r2_gain": explained, **{f"{name}_over_best": value for name, value in found.items()}},
        first if is_explained else found["narx"] <= 1.02 * found["auto"],
    )


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for every recording."""
    for path in sorted(TRACES.glob("*-resources.csv")):
        stem = path.stem.removesuffix("-resources")
        progress(stem)
        yield by_makespan(stem)


if __name__ == "__main__":
    main(__doc__ or "", rows)
