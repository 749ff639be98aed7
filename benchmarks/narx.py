"""NARX against the average on recordings of real CPU contention, as `benchmarks._record` makes."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks._common import Row, main, progress
from evenstep import Resources
from evenstep.prediction import Ema, Narx
from evenstep.sim import read_trace

TRACES = Path(__file__).parent / "traces"
FIRST = 200  # forecasts from this step on count


def resources_of(path: Path, num_workers: int) -> tuple[np.ndarray, np.ndarray]:
    """Return free CPU and free bytes, ``(num_steps, num_workers)`` each."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    free = np.array([float(row["free_cpu"]) for row in rows]).reshape(-1, num_workers)
    memory = np.array([int(row["free_memory_bytes"]) for row in rows]).reshape(-1, num_workers)
    return free, memory


def compare(stem: str, *, shuffled: bool) -> Row:
    """Return how far off NARX's forecasts of speed are, beside the average's.

    ``shuffled`` shows it resources of other steps, which explain nothing.
    """
    slope_s = read_trace(TRACES / f"{stem}.csv").workload.slope_s
    speeds = 1 / slope_s
    free, memory = resources_of(TRACES / f"{stem}-resources.csv", speeds.shape[1])
    if shuffled:
        order = np.random.default_rng(0).permutation(len(free))
        free, memory = free[order], memory[order]
    narx, ema = Narx(), Ema()
    states = narx.init(speeds.shape[1]), ema.init(speeds.shape[1])
    errors, decided = [], []
    for step, speed in enumerate(speeds):
        if step >= FIRST:
            said = narx.predict(states[0]), ema.predict(states[1])
            errors.append([(forecast / speed - 1) ** 2 for forecast in said])
            decided.append(narx.decides(states[0]))
        spare = Resources(free[step], memory[step])
        states = narx.update(states[0], speed, spare), ema.update(states[1], speed)
    rmse = np.sqrt(np.mean(errors, axis=(0, 2)))
    ratio, share = float(rmse[0] / rmse[1]), float(np.mean(decided))
    what = "resources of other steps" if shuffled else "as recorded"
    return Row(
        f"{stem}, {what}: {len(speeds)} steps of {speeds.shape[1]} workers",
        "<= 1.05 times EMA's error" if shuffled else "<= 0.7 times, NARX deciding >= 80 %",
        {"rmse_ratio": ratio, "ema_rmse": float(rmse[1]), "narx_decides": share},
        ratio <= 1.05 if shuffled else ratio <= 0.7 and share >= 0.8,
    )


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Yield both answers for every recording."""
    for path in sorted(TRACES.glob("*-resources.csv")):
        stem = path.stem.removesuffix("-resources")
        progress(stem)
        yield compare(stem, shuffled=False)
        yield compare(stem, shuffled=True)


if __name__ == "__main__":
    main(__doc__ or "", rows)
