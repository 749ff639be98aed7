"""What the first batch of a huge order costs in time and memory: balanced against plain DDP.

Two ranks, in fresh processes for each loop. A plain rank draws an order of its own, as its script
would; of balanced ones, rank 0 draws for both.
"""

from __future__ import annotations

import argparse
import resource
import sys
from collections.abc import Iterator
from time import perf_counter

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler

from benchmarks._common import Row, main, progress
from evenstep.testing import run_workers
from evenstep.torch import Balancer, Runtime

BATCH_SIZE = 32
NUM_STEPS = 600  # past several blocks
FIRST_S = 1.0
MEMORY_MIB = 50
MIB = 1 << 20


class _Numbers(Dataset[torch.Tensor]):
    """So many samples that cost nothing."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index / self._length])


def loader_of(kind: str, length: int) -> DataLoader[torch.Tensor]:
    """Return the loader of a plain script."""
    if kind == "with replacement":
        data = _Numbers(1 << 20)
        drawn = RandomSampler(data, replacement=True, num_samples=length)
        return DataLoader(data, batch_size=BATCH_SIZE, sampler=drawn)
    data = _Numbers(length)
    if kind == "DistributedSampler":
        return DataLoader(data, batch_size=BATCH_SIZE, sampler=DistributedSampler(data))
    return DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)


def train(rank: int, kind: str, length: int, balanced: bool) -> tuple[float, float]:
    """Return the seconds to the first batch, and the most memory of this process in MiB."""
    model, loader = DistributedDataParallel(nn.Linear(1, 1)), loader_of(kind, length)
    balancer = Balancer(runtime=Runtime(line_every=None))
    if balanced:
        model, loader = balancer.prepare(model, loader)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    dist.barrier()
    began_s, first_s = perf_counter(), 0.0
    for number, batch in enumerate(loader):
        first_s = first_s or perf_counter() - began_s
        model(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == NUM_STEPS:
            break
    balancer.close()
    unit = 1 if sys.platform == "darwin" else 1024
    return first_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Compare the kinds of orders."""
    many, more = (10**6, 10**7) if options.quick else (50 * 10**6, 10**9)
    lengths = {"with replacement": more, "shuffle=True": many, "DistributedSampler": many}
    for kind, length in lengths.items():
        progress(f"{length:,} indices, {kind}")
        yield compare(kind, length)


def compare(kind: str, length: int) -> Row:
    """Return the row of one kind of order."""
    plain, ours = (
        run_workers(2, train, kind, length, balanced, timeout_s=600) for balanced in (False, True)
    )
    later_s = max(first_s for first_s, _ in ours) - max(first_s for first_s, _ in plain)
    more_mib = [mine - theirs for (_, mine), (_, theirs) in zip(ours, plain, strict=True)]
    return Row(
        what=f"{length:,} indices, {kind}, {NUM_STEPS} steps",
        bar=f"first batch {FIRST_S:g} s later at most, {MEMORY_MIB} MiB more at most on any rank",
        measured={
            "plain first batch, s": [first_s for first_s, _ in plain],
            "balanced, s": [first_s for first_s, _ in ours],
            "plain MiB": [round(memory) for _, memory in plain],
            "balanced MiB": [round(memory) for _, memory in ours],
            "later by, s": later_s,
            "more, MiB": more_mib,
        },
        met=later_s <= FIRST_S and max(more_mib) <= MEMORY_MIB,
    )


if __name__ == "__main__":
    main(__doc__ or "", rows)
