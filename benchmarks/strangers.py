"""Strangers at rank 0's port while two ranks train: many idle ones, slow ones, replays, forgeries.

Two ranks on this machine train a small model by DDP, with 1,024 descriptors for rank 0. The
strangers come from another process, which also listens in on the loopback (that takes root).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from time import clock_gettime, perf_counter, process_time, pthread_getcpuclockid
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from benchmarks._attackers import Crowd, Most, Sniffer, forge, replay
from benchmarks._common import Row, main, progress
from evenstep.testing import run_workers
from evenstep.torch import Balancer, Runtime

NUM_STRANGERS, NUM_DRIPPERS = 2000, 100
_WIDTH, _BATCH = 512, 128


@dataclass
class Ran:
    """What a rank saw of a run.

    Attributes:
        started_s: until its first batch.
        cpu_s: of the process, by what the strangers did, in each phase.
        serving_s: of the thread that serves connections alone.
        refused: whether the replay was.
        num_steps: that it made.
        logged: what evenstep said.
    """

    started_s: float = 0.0
    cpu_s: dict[str, list[float]] = field(default_factory=dict)
    serving_s: dict[str, list[float]] = field(default_factory=dict)
    refused: bool | None = None
    num_steps: int = 0
    logged: list[str] = field(default_factory=list)


class Director:
    """Does at rank 0's port what rank 0 asks for, over a connection of their own.

    Attributes:
        port: that rank 0 is to listen at.
        where: port at which rank 0 asks.
        descriptors: after the end, the most that rank 0 had open.
    """

    def __init__(self) -> None:  # noqa: D107  # the class says it
        self.port, self.descriptors = free_port(), 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.where = self._server.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        """Wait until rank 0 has gone."""
        self._thread.join()
        self._server.close()

    def _serve(self) -> None:
        connection, _ = self._server.accept()
        crowd, most = Crowd(self.port), None
        sniffer = Sniffer(self.port) if os.geteuid() == 0 else None
        with connection, connection.makefile("rw") as talk:
            for line in talk:
                answer: Any = None
                match json.loads(line):
                    case ["pid", pid]:
                        most = Most(pid)
                    case ["crowd"]:
                        crowd.connect(NUM_STRANGERS)
                    case ["quiet"]:
                        crowd.leave()
                    case ["replay"] if sniffer is not None:
                        answer = replay(self.port, sniffer.heard())
                talk.write(json.dumps(answer) + "\n")
                talk.flush()
        crowd.leave()
        self.descriptors = 0 if most is None else most.close()
        if sniffer is not None:
            sniffer.close()


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


def train(rank: int, port: int, director: int | None, phases: int, steps: int) -> Ran:
    """Train; between two phases, rank 0 has the director change what the strangers do."""
    torch.set_num_threads(1)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, most))
    ran = Ran()
    logs(ran.logged)
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.ReLU(), torch.nn.Linear(_WIDTH, _WIDTH)
    )
    data = Samples(2 * _BATCH * steps)
    began_s = perf_counter()
    runtime = Runtime(ports=port, line_every=None, deadline_s=20)
    with (
        Talk(director if rank == 0 else None) as ask,
        Balancer(policy="equal", runtime=runtime) as balancer,
    ):
        model, loader = balancer.prepare(
            DistributedDataParallel(model), DataLoader(data, batch_size=_BATCH)
        )
        ask("pid", os.getpid())
        for number in range(phases):
            name = ("quiet", "crowd")[number % 2]
            cpu_s, serving_s = process_time(), channel_s()
            ask(name)
            for x in loader:
                ran.started_s = ran.started_s or perf_counter() - began_s
                model(x).square().mean().backward()
                ran.num_steps += 1
            ran.cpu_s.setdefault(name, []).append(process_time() - cpu_s)
            ran.serving_s.setdefault(name, []).append(channel_s() - serving_s)
            if number == phases - 1 and rank == 1:
                forge(port)
        ran.refused = ask("replay")
        for x in loader:
            model(x).square().mean().backward()
            ran.num_steps += 1
    return ran


class Talk:
    """Rank 0's connection to the director.

    Args:
        where: the port; None where nothing is to be asked.
    """

    def __init__(self, where: int | None) -> None:  # noqa: D107  # the class says it
        self._where = where

    def __enter__(self) -> Talk:
        """Connect."""
        if self._where is not None:
            self._connection = socket.create_connection(("127.0.0.1", self._where))
            self._talk = self._connection.makefile("rw")
        return self

    def __exit__(self, *error: object) -> None:
        """Say goodbye."""
        if self._where is not None:
            with suppress(OSError):
                self._talk.close()
                self._connection.close()

    def __call__(self, *words: Any) -> Any:
        """Return what the director answers, once it has done what it was asked for."""
        if self._where is None:
            return None
        self._talk.write(json.dumps(words) + "\n")
        self._talk.flush()
        return json.loads(self._talk.readline())


def channel_s() -> float:
    """Return the CPU time of the thread that serves connections, so far; 0 before there is one."""
    for thread in threading.enumerate():
        if thread.name == "evenstep-channel" and thread.ident is not None:
            return clock_gettime(pthread_getcpuclockid(thread.ident))
    return 0.0


def logs(texts: list[str]) -> None:
    """Have everything that evenstep logs added to a list."""
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("evenstep").addHandler(handler)


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Train beside strangers, then start beside them."""
    yield from while_training(2 if options.quick else 6, 600)
    yield at_the_start(1 if options.quick else 5)


def while_training(phases: int, steps: int) -> Iterator[Row]:
    """Alternate phases without strangers and with a crowd of them; end with the attacks."""
    progress(f"{phases} phases of {steps} steps, every other one with {NUM_STRANGERS} strangers")
    director = Director()
    try:
        first, other = run_workers(
            2, train, director.port, director.where, phases, steps, timeout_s=1200
        )
    finally:
        director.close()
    yield Row(
        f"{NUM_STRANGERS} idle strangers under `ulimit -n 1024`: descriptors of rank 0",
        "<= 200",
        {"most": director.descriptors},
        met=director.descriptors <= 200,
    )
    more_s = sum(first.serving_s["crowd"]) - sum(first.serving_s["quiet"])
    extra = more_s / sum(first.cpu_s["quiet"])
    yield Row(
        "CPU that they cost the thread that serves connections, their coming included",
        "<= 5 % of what rank 0 takes without them",
        {"extra": extra, "serving_s": first.serving_s, "rank_0_s": first.cpu_s},
        met=extra <= 0.05,
    )
    num_steps = (phases + 1) * steps
    complete = first.num_steps == other.num_steps == num_steps
    yield Row(
        "all that rank 1 sent is sent again over another connection",
        "refused; every step is made",
        {"refused": "only root can listen in" if first.refused is None else first.refused},
        met=None if first.refused is None else first.refused and complete,
    )
    reasons = [text for text in first.logged if "a message was refused" in text]
    again = [text for text in first.logged if "was restored" in text]
    yield Row(
        "a forged message in rank 1's connection",
        "refused with a reason, never acted on; the connection is made again",
        {"reasons": reasons, "made_again": len(again), "steps": first.num_steps},
        met=len(reasons) == 1 and len(again) == 1 and complete,
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
            first, _ = run_workers(2, train, port, None, 1, 1)
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
