"""Strangers at rank 0's port: slow ones at the start, a flood of calls and a forgery in training.

Two ranks on this machine train a small model by DDP. The strangers come from another process.
"""

from __future__ import annotations

import argparse
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from time import clock_gettime, perf_counter, process_time, pthread_getcpuclockid
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from benchmarks._attackers import Crowd, Flood, forge
from benchmarks._common import Row, main, progress
from evenstep.exceptions import WorkerLostError
from evenstep.testing import run_workers
from evenstep.torch import Balancer, Runtime

NUM_DRIPPERS = 100
_WIDTH, _BATCH = 512, 128


@dataclass
class Ran:
    """What a rank saw of a run.

    Attributes:
        started_s: until its first batch.
        cpu_s: of the process, by what the strangers did, in each phase.
        serving_s: of the thread that serves connections alone.
        num_steps: that it made.
        num_refused, num_accepted: calls of the flood.
        ended: the error that ended it.
    """

    started_s: float = 0.0
    cpu_s: dict[str, list[float]] = field(default_factory=dict)
    serving_s: dict[str, list[float]] = field(default_factory=dict)
    num_steps: int = 0
    num_refused: int = 0
    num_accepted: int = 0
    ended: str = ""


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Samples(Dataset[torch.Tensor]):
    """So many samples, which take no memory.

    Args:
        number: of them.
    """

    def __init__(self, number: int) -> None:  # noqa: D107  # the class says it
        self._number = number
        self._row = torch.randn(_WIDTH)

    def __len__(self) -> int:
        """Return their number."""
        return self._number

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return one."""
        return self._row


def train(rank: int, port: int, phases: int, steps: int) -> Ran:
    """Train; in every other phase, rank 0's port is flooded. After the last, rank 1 is forged."""
    torch.set_num_threads(1)
    ran = Ran()
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.ReLU(), torch.nn.Linear(_WIDTH, _WIDTH)
    )
    data = Samples(2 * _BATCH * steps)
    began_s = perf_counter()
    runtime = Runtime(ports=port, line_every=None, deadline_s=20)
    try:
        with Balancer(policy="equal", runtime=runtime) as balancer:
            model, loader = balancer.prepare(
                DistributedDataParallel(model), DataLoader(data, batch_size=_BATCH)
            )
            for number in range(phases):
                name = ("quiet", "flood")[number % 2]
                flood = Flood(port) if (rank, name) == (0, "flood") else None
                cpu_s, serving_s = process_time(), channel_s()
                for x in loader:
                    ran.started_s = ran.started_s or perf_counter() - began_s
                    model(x).square().mean().backward()
                    ran.num_steps += 1
                ran.cpu_s.setdefault(name, []).append(process_time() - cpu_s)
                ran.serving_s.setdefault(name, []).append(channel_s() - serving_s)
                if flood is not None:
                    flood.close()
                    ran.num_refused += flood.num_refused
                    ran.num_accepted += flood.num_accepted
            if rank == 1 and phases > 1:
                forge(port)
            for x in loader if phases > 1 else ():
                model(x).square().mean().backward()
    except WorkerLostError as error:
        ran.ended = str(error)
    return ran


def channel_s() -> float:
    """Return the CPU time of the thread that serves connections, so far; 0 before there is one."""
    for thread in threading.enumerate():
        if thread.name == "evenstep-channel" and thread.ident is not None:
            return clock_gettime(pthread_getcpuclockid(thread.ident))
    return 0.0


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Train beside strangers, then start beside them."""
    yield from while_training(2 if options.quick else 6, 600)
    yield at_the_start(1 if options.quick else 5)


def while_training(phases: int, steps: int) -> Iterator[Row]:
    """Alternate phases without strangers and with a flood of them; end with a forgery."""
    progress(f"{phases} phases of {steps} steps, every other one in a flood")
    first, other = run_workers(2, train, free_port(), phases, steps, timeout_s=1200)
    complete = first.num_steps == other.num_steps == phases * steps
    yield Row(
        "a process connects to rank 0's port as often as it can",
        "each call is refused by the system; every step is made",
        {"refused": first.num_refused, "accepted": first.num_accepted, "steps": first.num_steps},
        met=complete and first.num_refused > 0 == first.num_accepted,
    )
    more_s = sum(first.serving_s["flood"]) - sum(first.serving_s["quiet"])
    extra = more_s / sum(first.cpu_s["quiet"])
    yield Row(
        "CPU that this costs the thread that serves connections",
        "<= 5 % of what rank 0 takes without it",
        {"extra": extra, "serving_s": first.serving_s, "rank_0_s": first.cpu_s},
        met=extra <= 0.05,
    )
    yield Row(
        "a forged message in rank 1's connection",
        "never acted on; rank 0 ends and names rank 1 and the reason",
        {"rank_0": first.ended, "rank_1": other.ended},
        met="Rank 1 " in first.ended and "was refused" in first.ended and bool(other.ended),
    )


def at_the_start(num_runs: int) -> Row:
    """Start with slow strangers at the door and without them, in turns."""
    taken_s: dict[str, list[float]] = {"alone": [], "one dripper": [], "many": []}
    numbers = {"alone": 0, "one dripper": 1, "many": NUM_DRIPPERS}
    there = []
    for number in range(num_runs):
        for name, drippers in numbers.items():
            progress(f"start {number + 1} of {num_runs}: {name}")
            port = free_port()
            crowd = Crowd(port)
            crowd.drip(drippers, every_s=2.0)
            first, _ = run_workers(2, train, port, 1, 1)
            there.append(crowd.leave() - drippers)
            taken_s[name].append(first.started_s)
    middle = {name: median(times) for name, times in taken_s.items()}
    late_s = {name: middle[name] - middle["alone"] for name in ("one dripper", "many")}
    return Row(
        f"one stranger that sends a byte every 2 s from the start on, and {NUM_DRIPPERS} of them",
        "start delayed by at most 1 s",
        {"delayed_s": late_s, "start_s": middle, "missed_the_start": -min(there)},
        met=max(late_s.values()) <= 1.0,
    )


if __name__ == "__main__":
    main(__doc__, rows)
