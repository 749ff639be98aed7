"""Record how fast workers really compute while other processes come and go on their cores.

Every worker has a core of its own where there are enough, computes so many samples a step, and
waits for the others; hogs spin on the cores for some seconds at a time. Writes two tables:
what ``evenstep.sim.read_trace`` reads, and beside it what psutil said was free on the worker's
core at the end of every step, for ``benchmarks.narx``.

The two that are kept here were made on two cores by

    python -m benchmarks._record benchmarks/traces/hogs --steps 900
    python -m benchmarks._record benchmarks/traces/contention --workers 6 --samples 24 --seed 1

the second without its table of resources, as six workers on two cores disturb each other.
"""

from __future__ import annotations

import argparse
import csv
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np
import psutil

from benchmarks._common import progress

CONTEXT = get_context("forkserver")
HOGS_PER_CORE = 2
AWAY_S, THERE_S = (1.0, 8.0), (1.0, 8.0)  # a hog stays away and comes back, between these
GAP_S = 0.02  # where a step would reduce gradients: the core is free, unless somebody hogs it


@dataclass(frozen=True)
class Recording:
    """What was measured, ``(num_steps, num_workers)`` each.

    Attributes:
        seconds: of the samples of a step.
        free_cpu: idle share of the worker's core since the step before.
        free_memory_bytes: of the machine.
    """

    seconds: np.ndarray
    free_cpu: np.ndarray
    free_memory_bytes: np.ndarray


def compute(link: Connection, core: int, samples: int) -> None:
    """Compute ``samples`` whenever asked, and tell the seconds; None ends it."""
    os.sched_setaffinity(0, {core})
    matrix = np.random.default_rng(0).standard_normal((48, 48))
    while link.recv():
        began_s = perf_counter()
        for _ in range(samples):
            for _ in range(20):
                matrix = np.tanh(matrix @ matrix.T / 48)
        link.send(perf_counter() - began_s)


def hog(link: Connection, core: int, seed: int) -> None:
    """Spin on ``core`` now and then, by a clock of its own, until told to end."""
    os.sched_setaffinity(0, {core})
    draw = np.random.default_rng(seed)
    while not link.poll(draw.uniform(*AWAY_S)):
        until_s = perf_counter() + draw.uniform(*THERE_S)
        while perf_counter() < until_s and not link.poll():
            sum(range(1000))


@contextmanager
def started(targets: list[tuple[Any, ...]]) -> Iterator[list[Connection]]:
    """Yield a connection to a process for each target with its arguments."""
    processes, links = [], []
    for target, *arguments in targets:
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=target, args=(theirs, *arguments), daemon=True)
        process.start()
        processes.append(process)
        links.append(ours)
    try:
        yield links
    finally:
        for link, process in zip(links, processes, strict=True):
            link.send(None)
            process.join(10)


def record(num_workers: int, samples: int, num_steps: int, seed: int) -> Recording:
    """Return what ``num_workers`` measured while hogs came and went."""
    cores = sorted(os.sched_getaffinity(0))
    of_worker = [cores[k % len(cores)] for k in range(num_workers)]
    shape = (num_steps, num_workers)
    seconds, free, memory = np.zeros(shape), np.zeros(shape), np.zeros(shape, np.int64)
    spinners = [(hog, core, seed + n) for n, core in enumerate(HOGS_PER_CORE * cores)]
    with (
        started([(compute, core, samples) for core in of_worker]) as workers,
        started(spinners),
    ):
        psutil.cpu_percent(percpu=True)
        for step in range(num_steps):
            if step % 50 == 0:
                progress(f"step {step} of {num_steps}")
            sleep(GAP_S)
            for link in workers:
                link.send(True)
            seconds[step] = [link.recv() for link in workers]
            busy = psutil.cpu_percent(percpu=True)
            free[step] = [1 - min(busy[core], 100.0) / 100 for core in of_worker]
            memory[step] = psutil.virtual_memory().available
    return Recording(seconds, free, memory)


def write(stem: Path, recording: Recording, samples: int | np.ndarray) -> None:
    """Write both tables."""
    size = np.broadcast_to(samples, recording.seconds.shape)
    stem.parent.mkdir(parents=True, exist_ok=True)
    num_steps, num_workers = recording.seconds.shape
    trace, resources = stem.with_suffix(".csv"), stem.with_name(f"{stem.name}-resources.csv")
    with trace.open("w", newline="") as times, resources.open("w", newline="") as spare:
        timed, free = csv.writer(times), csv.writer(spare)
        timed.writerow(["step", "worker", "seconds", "samples"])
        free.writerow(["step", "worker", "free_cpu", "free_memory_bytes"])
        for step in range(num_steps):
            for k in range(num_workers):
                timed.writerow([step, k, f"{recording.seconds[step, k]:.6f}", size[step, k]])
                said = recording.free_cpu[step, k], recording.free_memory_bytes[step, k]
                free.writerow([step, k, f"{said[0]:.3f}", said[1]])


def main() -> None:
    """Record and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stem", type=Path, help="where to write, without an ending")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--samples", type=int, default=192, help="of each worker in each step")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0, help="of the hogs")
    options = parser.parse_args()
    recording = record(options.workers, options.samples, options.steps, options.seed)
    write(options.stem, recording, options.samples)
    each_s = np.median(recording.seconds, axis=0)
    print(f"{options.stem}.csv: {options.steps} steps, medians {each_s.round(4).tolist()} s")


if __name__ == "__main__":
    main()
