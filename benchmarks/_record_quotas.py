"""Record how fast workers compute under CPU quotas that change, and what each reads of itself.

Every worker has a control group of its own (version 1, so root and Linux). Quotas are drawn anew by
a clock that knows nothing of steps. In each step the workers compute parts in proportion to their
last speeds, read what they can have as they do in training, and wait for the others. The tables are
those of ``benchmarks._record``. The ones that are kept were made on two cores by

    alias record="python -m benchmarks._record_quotas --steps 400"
    record benchmarks/traces/quotas --samples 100 --every 0.6
    record benchmarks/traces/quotas-hogs --workers 2 --hogs 1 --every 1.5 --seed 1
    record benchmarks/traces/neighbours --workers 2 --hogs 2 --every 0
    record benchmarks/traces/steady-quotas --workers 2 --every 1e9 --seed 3
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter, sleep

import numpy as np

from benchmarks._common import progress
from benchmarks._record import GAP_S, Recording, hog, started, write
from evenstep import Cluster
from evenstep._host import Cgroups
from evenstep._run import ProcessReader
from evenstep.solve._apportion import apportion

PERIOD_US = 10_000  # with the usual 100 ms, a step would feel single periods
LEAST, MOST = 0.12, 0.6  # cores of a quota, drawn evenly by ratio
SHARES = 20_000  # against other processes of the machine, which have 1024


@contextmanager
def groups(number: int) -> Iterator[list[Path]]:
    """Yield the folders of so many new groups without a quota."""
    root = Cgroups.find().first_cpu[-1]
    folders = [root / f"evenstep-record-{os.getpid()}-{k}" for k in range(number)]
    for folder in folders:
        folder.mkdir()
        (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (folder / "cpu.shares").write_text(str(SHARES))
    try:
        yield folders
    finally:
        for folder in folders:
            folder.rmdir()


def set_quota(folder: Path, cores: float) -> None:
    """Let the group have so many cores."""
    (folder / "cpu.cfs_quota_us").write_text(str(round(cores * PERIOD_US)))


def compute(link: Connection, folder: Path, core: int) -> None:
    """Compute as many samples as asked; tell the seconds, and what can be had then."""
    (folder / "cgroup.procs").write_text(str(os.getpid()))
    os.sched_setaffinity(0, {core})
    matrix, reader = np.random.default_rng(0).standard_normal((48, 48)), ProcessReader()
    while samples := link.recv():
        began_s = perf_counter()
        for _ in range(20 * samples):
            matrix = np.tanh(matrix @ matrix.T / 48)
        link.send((perf_counter() - began_s, *reader.read()))


def hog_in(link: Connection, folder: Path, core: int, seed: int) -> None:
    """Be a hog beside a worker, with as many shares as it has."""
    (folder / "cgroup.procs").write_text(str(os.getpid()))
    hog(link, core, seed)


def govern(link: Connection, folders: list[Path], every_s: float, seed: int) -> None:
    """Draw some group's quota anew by a clock, each every ``every_s`` in the mean."""
    draw = np.random.default_rng(seed)
    for folder in folders:
        set_quota(folder, LEAST * (MOST / LEAST) ** draw.uniform())
    link.send(True)
    while not link.poll(draw.exponential(every_s / len(folders))):
        set_quota(folders[draw.integers(len(folders))], LEAST * (MOST / LEAST) ** draw.uniform())


def record(options: argparse.Namespace) -> tuple[Recording, np.ndarray]:
    """Return what the workers measured and read, and how many samples each had."""
    cores = sorted(os.sched_getaffinity(0))
    number, num_hogs = options.workers, options.hogs * options.workers
    of_worker = [cores[k % len(cores)] for k in range(number)]
    cluster = Cluster(number, options.samples * number)
    seconds, free, memory = np.zeros((3, options.steps, number))
    samples = np.full((options.steps, number), options.samples)
    with groups(number + num_hogs) as folders:
        mine, beside = folders[:number], folders[number:]
        workers_in = [(compute, *each) for each in zip(mine, of_worker, strict=True)]
        hogs_in = [
            (hog_in, folder, of_worker[n % number], options.seed + n)
            for n, folder in enumerate(beside)
        ]
        governors = [(govern, mine, options.every, options.seed)] if options.every else []
        with started(workers_in) as workers, started(hogs_in), started(governors) as clock:
            for link in clock:
                link.recv()
            for step in range(options.steps):
                if step % 50 == 0:
                    progress(f"step {step} of {options.steps}")
                if step:
                    speed = samples[step - 1] / seconds[step - 1]
                    samples[step] = apportion(speed, cluster)
                sleep(GAP_S)
                for link, size in zip(workers, samples[step].tolist(), strict=True):
                    link.send(size)
                told = [link.recv() for link in workers]
                seconds[step], free[step], memory[step] = zip(*told, strict=True)
    return Recording(seconds, free, memory.astype(np.int64)), samples


def main() -> None:
    """Record and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stem", type=Path, help="where to write, without an ending")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument(
        "--samples", type=int, default=150, help="of a worker in a step, on average"
    )
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--every", type=float, default=0.8, help="seconds between changes; 0: none")
    parser.add_argument("--hogs", type=int, default=0, help="beside every worker")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    recording, samples = record(options)
    write(options.stem, recording, samples)
    each_s = np.median(recording.seconds, axis=0)
    print(f"{options.stem}.csv: {options.steps} steps, medians {each_s.round(4).tolist()} s")


if __name__ == "__main__":
    main()
