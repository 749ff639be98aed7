"""Whether a slow link is named by the kernel's accounts alone: `sudo python -m benchmarks.links`.

Plain DDP over gloo on 4 and 6 hosts of one machine (`evenstep.lab`: Linux and root only), whose
links carry 200 Mbit/s both ways, under `evenstep watch`. In each run something else is slow, on a
host that a seed draws: its way out or its way in, at 30 to 50 Mbit/s; one pair; a rank whose
receive buffers are small; two hosts at once; or nothing.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks._common import Row, environment, main, progress
from benchmarks._network_lab import no_lab
from benchmarks._played import diagnoses
from evenstep._diagnosis import Cause
from evenstep.events import WaitingDiagnosed
from evenstep.lab import Host, Lab

MBIT = 200.0
KINDS = {"egress": "it sends", "ingress": "it receives", "link": "its link", "reader": "could take"}
PAIR = (
    "tc qdisc replace dev eth0 root handle 1: htb default 1",
    "tc class add dev eth0 parent 1: classid 1:1 htb rate {usual:g}mbit burst 32k",
    "tc class add dev eth0 parent 1: classid 1:2 htb rate {mbit:g}mbit burst 32k",
    "tc filter add dev eth0 parent 1: protocol ip u32 match ip dst {address}/32 flowid 1:2",
)


def train(kind: str, slow: int, mbit: float, seconds: float) -> None:
    """Train on one rank for so long; slow down what a lab cannot."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))))
    if kind == "link" and rank == slow:
        peer = socket.gethostbyname(f"lab-h{(rank - 1) % world_size}")
        for command in PAIR:
            text = command.format(usual=MBIT, mbit=mbit, address=peer)
            subprocess.run(text.split(), check=True)
    if kind == "reader" and rank == slow:
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    optimizer, until_s = torch.optim.SGD(model.parameters(), 0.01), time.monotonic() + seconds
    over = torch.zeros(1)
    while not over:
        time.sleep(0.02)
        model(torch.randn(4, 256)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        over.fill_(time.monotonic() > until_s)
        dist.broadcast(over, 0)
    dist.destroy_process_group()


def run(
    kind: str, world_size: int, slow: list[int], mbit: float, seconds: float
) -> WaitingDiagnosed:
    """Return what the watch said of a run at its end."""
    rates = [[MBIT, MBIT] for _ in range(world_size)]
    if kind in ("egress", "two"):
        rates[slow[0]][0] = mbit
    if kind in ("ingress", "two"):
        rates[slow[kind == "two"]][1] = mbit
    hosts = [Host(mbit=(up, down)) for up, down in rates]
    with TemporaryDirectory() as folder, Lab(hosts) as lab:
        watch = ["-m", "evenstep.watch", "--every", "0", "--run-dir", folder, __file__]
        lines: list[str] = []
        asked = [kind, str(slow[0]), str(mbit), str(seconds)]
        if lab.torchrun([*watch, *asked], env=environment(), write=lines.append):
            raise RuntimeError("\n".join(lines))
        return diagnoses(Path(folder) / "events.jsonl")[-1]


def named(found: WaitingDiagnosed, world_size: int) -> list[tuple[str, int, int]]:
    """Return the kind of each link that was named, whose it is, and its sender around the ring."""
    said = []
    for cause, rank, evidence in zip(found.causes, found.ranks, found.evidence, strict=True):
        if cause == Cause.NETWORK and rank >= 0:
            kind = next(kind for kind, words in KINDS.items() if words in evidence)
            is_receiver = kind in ("ingress", "reader")
            said.append((kind, rank, (rank + is_receiver) % world_size))
    return said


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Play the runs."""
    if (missing := no_lab()) is not None:
        yield missing
        return
    number = 1 if options.quick else options.runs
    for kind in options.only.split(","):
        right_first, right_link, right_kind, said = 0, 0, 0, []
        for at in range(number):
            rng = np.random.default_rng([options.seed, at, *kind.encode()])
            world_size = (4, 6)[at % 2]
            first = int(rng.integers(world_size))
            slow = [first, (first + 2) % world_size]  # not both ends of one link
            mbit = float(rng.integers(30, 51))
            progress(f"{kind}, {world_size} hosts, {slow}, {mbit:g} Mbit/s")
            found = run(kind, world_size, slow, mbit, 8.0 if options.quick else options.seconds)
            links = named(found, world_size)
            kinds = {"two": ("egress", "ingress"), "healthy": ()}.get(kind, (kind,))
            truth = [
                (one, rank, (rank + (one in ("ingress", "reader"))) % world_size)
                for one, rank in zip(kinds, slow, strict=False)
            ]
            right_link += {sender for *_, sender in links} == {sender for *_, sender in truth}
            right_kind += set(links) == set(truth)
            right_first += links[:1] == [] == truth or bool({*links[:1]} & {*truth})
            said.append((truth, links))
        figures = {"right_first": right_first, "right_links": right_link, "right_kinds": right_kind}
        yield Row(
            f"{kind}: the first that is named; exactly the slow links; and of which kind they are",
            ">= 9 of 10 first, with their kind",
            {"of": number, **figures, "said": said},
            met=right_first >= 0.9 * number,
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add how many runs there are, and of what."""
    parser.add_argument("--runs", type=int, default=6, help="of each kind")
    parser.add_argument("--seconds", type=float, default=12.0, help="of each run")
    parser.add_argument("--seed", type=int, default=1, help="draws hosts and rates")
    parser.add_argument("--only", default=",".join([*KINDS, "two", "healthy"]), help="with commas")


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
    else:
        main(__doc__, rows, add_options)
