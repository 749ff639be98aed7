"""Training by a budget of tokens: what the workers of the tests run, and plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from time import sleep
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from evenstep.events import Rebalanced
from evenstep.torch import Balancer, Bounds, Checkpoint, Cost, Runtime

from .cost_runs import LENGTH, Masked, Scores, Series, loss_of, num_tokens, padded, whole

BUDGET, USUAL = 600, 20
QUIET = Runtime(line_every=None)
Found = tuple[torch.Tensor, list[list[int]], list[tuple[int, ...]]]


class TokenBudget:
    """Batches of samples of like length, of at most so many tokens with their padding.

    Shuffled by an epoch that it is told, or by a generator; so each epoch has other batches, and
    another number of them.
    """

    def __init__(self, budget: int = BUDGET, generator: torch.Generator | None = None) -> None:
        self.budget, self.generator, self.epoch = budget, generator, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(list(self._batches(torch.Generator().manual_seed(self.epoch))))

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches(self.generator or torch.Generator().manual_seed(self.epoch))

    def _batches(self, generator: torch.Generator) -> Iterator[list[int]]:
        order = torch.randperm(len(LENGTH), generator=generator).tolist()
        for first in range(0, len(order), 40):
            batch: list[int] = []
            for index in sorted(order[first : first + 40], key=lambda one: LENGTH[one]):
                if (len(batch) + 1) * LENGTH[index] > self.budget:
                    yield batch
                    batch = []
                batch.append(index)
            yield batch


def loader_of(workers: int = 0, batches: Any = None) -> DataLoader[Any]:
    batches = TokenBudget() if batches is None else batches
    return DataLoader(Series(), batch_sampler=batches, collate_fn=padded, num_workers=workers)


def alone(epochs: int, *, tokens: bool, batches: Any = None) -> Found:
    """Return what plain torch finds, without evenstep."""
    model = Scores() if tokens else Masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader, seen = loader_of(batches=batches), []
    for epoch in range(epochs):
        loader.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, batch, tokens=tokens).backward()
            optimizer.step()
            seen.append(batch[0].tolist())
    return torch.cat([p.detach().flatten() for p in model.parameters()]), seen, []


def train(
    rank: int,
    cost: Cost | None = None,
    *,
    world_size: int = 3,
    epochs: int = 2,
    kind: str = "plain",
    tokens: bool = False,
    workers: int = 0,
    folder: Path | None = None,
    stop_after: int | None = None,
    batches: Any = None,
    bounds: Bounds = Bounds(),  # noqa: B008  # a frozen value
) -> Found:
    """Train by a sampler of batches; the arguments and what is returned are as in ``cost_runs``."""
    events: list[Any] = []
    runtime = Runtime(line_every=None, hooks=(events.append,))
    model: Any = Scores() if tokens else Masked()
    if kind == "fsdp2" and world_size > 1:
        fully_shard(model)
    unit: Any = num_tokens if tokens else "samples"
    with Balancer(USUAL, cost=cost, unit=unit, bounds=bounds, runtime=runtime) as balancer:
        model, loader = balancer.prepare(model, loader_of(workers, batches))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        checkpoint = None
        if folder is not None:
            checkpoint = Checkpoint(folder, model=model, optimizer=optimizer, loader=loader)
            checkpoint.load()
        seen: list[list[int]] = []
        for step in islice(_steps(balancer, loader, kind, epochs), stop_after):
            mine: list[int] = []
            optimizer.zero_grad()
            for batch, num_samples in step:
                if world_size > 1:  # ranks of unlike speeds, or plans would stay
                    sleep(num_tokens(batch) * (1e-4 if rank else 2e-4))
                loss_of(model, batch, tokens=tokens).backward()
                mine += batch[0].tolist() if num_samples else []
            optimizer.step()
            seen.append(mine)
        if checkpoint is not None:
            checkpoint.save(len(seen))
    values = [whole(p).flatten() for p in model.parameters()]
    plans = [event.batch_size for event in events if isinstance(event, Rebalanced)]
    return torch.cat(values), seen, plans


def _steps(balancer: Balancer, loader: Any, kind: str, epochs: int) -> Iterator[Any]:
    """Yield the batches of each step, with their samples: none in one that stands in."""
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        if kind == "plain":
            yield from ([(batch, balancer.num_samples)] for batch in loader)
            continue
        for step in loader.steps():
            yield zip(step, [part.num_samples for part in step.micro_batches], strict=True)
