"""Blocks of steps that a rank trains by one method or another, and what it saw of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from benchmarks._common import progress
from benchmarks._lengths_packs import Packs, packs, unpacked
from benchmarks._lengths_training import (
    Cell,
    Device,
    Reader,
    Text,
    contention,
    loss_of,
    packed,
    padded,
    text,
)
from evenstep.events import Event, Rebalanced
from evenstep.torch import Balancer, Cost, Runtime

BATCH, NUM_RANKS = 32, 4


def equal_count(lengths: np.ndarray) -> np.ndarray:
    """Return the rank of each sample: as many for each, in the order they come."""
    return np.arange(len(lengths)) * NUM_RANKS // len(lengths)


def rebalance_sampler(lengths: np.ndarray) -> np.ndarray:
    """Return the same as transformers' `BatchRebalanceSampler`: longest first, where least is."""
    cost = lengths + 0.001 * lengths**2
    load, owner = np.zeros(NUM_RANKS), np.empty(len(cost), np.int64)
    for sample in np.argsort(-cost, kind="stable"):
        owner[sample] = rank = load.argmin()
        load[rank] += cost[sample]
    return owner


SAMPLERS = {
    "plain": equal_count,
    "rebalance_sampler": rebalance_sampler,
    "packs, plain": equal_count,
}
"""Of plain DDP, which take speeds to be equal."""


@dataclass(frozen=True)
class Block:
    """Some steps that one method trains in a row.

    Attributes:
        method: its name.
        order: indices of the samples of each step, ``(num_steps, batch_size)``; of packs where the
            method has them.
    """

    method: str
    order: np.ndarray

    @property
    def has_packs(self) -> bool:
        """Whether a sample is a pack of several."""
        return self.method.startswith("packs")

    def data(self) -> Text | Packs:
        """Return what it trains on."""
        return packs(text()) if self.has_packs else text()


@dataclass(frozen=True)
class Trained:
    """What a rank saw in a block.

    Attributes:
        ends_s: by a clock that all ranks have in common: the beginning, and the end of each step.
        device_s: emulated time of its device in each step.
        cpu_s: of its forwards and backwards.
        process_s: CPU time of the whole process meanwhile.
        plans: steps from which on a new plan was in force.
    """

    ends_s: list[float]
    device_s: list[float]
    cpu_s: float
    process_s: float
    plans: list[int] = field(default_factory=list)


def train(rank: int, cell: Cell, blocks: Sequence[Block], checks: int) -> list[Any]:
    """Return the contention of this rank, and what it saw in each block."""
    torch.set_num_threads(1)
    text()
    found: list[Any] = [contention(cell, rank, checks)]
    for number, block in enumerate(blocks):
        if rank == 0:
            progress(f"{cell}: block {number + 1} of {len(blocks)}, {block.method}")
        run = sampled if block.method in SAMPLERS else balanced
        found.append(run(rank, cell, block))
    return found


def sampled(rank: int, cell: Cell, block: Block) -> Trained:
    """Train by plain DDP, with a sampler that knows the lengths."""
    data, divide = block.data(), SAMPLERS[block.method]
    own = [some[divide(data.lengths[some]) == rank].tolist() for some in block.order]
    loader = loader_of(cell, block, batch_sampler=own)
    device = Device(cell, rank)
    model = DistributedDataParallel(Reader(device))
    share = None if block.has_packs else NUM_RANKS / block.order.shape[1]
    return loop(model, loader, device, share=share)


def balanced(rank: int, cell: Cell, block: Block) -> Trained:
    """Train by a balancer, told of lengths or not."""
    device = Device(cell, rank)
    stock = loader_of(
        cell,
        block,
        batch_size=block.order.shape[1] // NUM_RANKS,
        sampler=block.order.ravel().tolist(),
    )
    events: list[Event] = []
    runtime = Runtime(line_every=None, hooks=(events.append,))
    with Balancer(cost=told(cell, block), runtime=runtime) as balancer:
        model, loader = balancer.prepare(Reader(device), stock)
        found = loop(model, loader, device)
    plans = [event.step for event in events if isinstance(event, Rebalanced)]
    return replace(found, plans=plans)


def told(cell: Cell, block: Block) -> Cost | None:
    """Return what a balancer is told of the costs."""
    data = block.data()
    if isinstance(data, Packs):
        return Cost(data.features, padded=False)
    return Cost(data.lengths, padded=cell.padded) if block.method.startswith("ours") else None


def loader_of(cell: Cell, block: Block, **settings: Any) -> DataLoader[Any]:
    """Return a stock loader."""
    one_row = unpacked if block.has_packs else packed
    collate: Any = padded if cell.padded else one_row
    return DataLoader(block.data(), collate_fn=collate, **settings)


def loop(model: Any, loader: Any, device: Device, *, share: float | None = None) -> Trained:
    """Train; a rank's mean loss weighs ``share`` per sample, None leaves it as it is."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    dist.barrier()
    ends_s, process_s = [perf_counter()], process_time()
    for tokens, lengths, returns in loader:
        loss = loss_of(model(tokens, lengths), returns)
        (loss if share is None else loss * len(lengths) * share).backward()
        optimizer.step()
        optimizer.zero_grad()
        ends_s.append(perf_counter())
    return Trained(ends_s, device.took_s, device.cpu_s, process_time() - process_s)
