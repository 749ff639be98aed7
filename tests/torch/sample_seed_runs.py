"""Training with random augmentation and dropout, for the tests of seeds by sample."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from evenstep.claims import Hybrid
from evenstep.torch import Balancer, Bounds, Runtime

from .plans import Restless

GLOBAL, NUM_SAMPLES, NUM_EPOCHS = 12, 12 * 3 + 5, 2  # three full steps in an epoch, and a short one
LENGTHS = tuple(1 + number % 7 for number in range(NUM_SAMPLES))


@dataclass(frozen=True)
class Loop:
    """How a script loops.

    Attributes:
        by_steps: whether it takes micro-batches.
        num_workers: processes that fetch.
        costs: whether samples are assigned by cost.
        claims: whether samples are claimed.
        num_loaders: that take turns, one epoch each.
        shards: whether FSDP2 shards the model.
        ahead: whether it fetches a batch ahead, and trains on copies.
        seed: of what is random in samples; None leaves it to the ranks.
        first: step to resume at.
        last: step to stop before.
    """

    by_steps: bool = False
    num_workers: int = 0
    costs: bool = False
    claims: bool = False
    num_loaders: int = 1
    shards: bool = False
    ahead: bool = False
    seed: int | None = 7
    first: int = 0
    last: int | None = None


LOOPS = {
    "plain": Loop(),
    "workers": Loop(num_workers=2),
    "micro-batches": Loop(by_steps=True),
    "claims": Loop(by_steps=True, claims=True),
    "costs": Loop(by_steps=True, costs=True),
    "two loaders": Loop(num_loaders=2),
    "fetched ahead": Loop(ahead=True),
    "FSDP2": Loop(by_steps=True, shards=True),
    "no seed": Loop(seed=None),
}


class Noisy(Dataset):
    """Samples with an augmentation from each of the three generators."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.values = torch.randn(NUM_SAMPLES, 16, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.randn(16, dtype=torch.float64) + np.random.rand() + random.random()
        return self.values[index] + 0.3 * noise


class Dropping(nn.Module):
    """Dropout of elements, of channels and of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 1)
        self.elements, self.channels = nn.Dropout(0.4), nn.Dropout2d(0.3)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        hidden = self.elements(self.first(value).tanh())
        hidden = self.channels(hidden.view(-1, 8, 2, 2)).flatten(1)
        kept = hidden.new_empty(len(hidden), 1).bernoulli_(0.8)
        return self.last(functional.dropout(hidden * kept, 0.2, self.training, inplace=True))


def train(rank: int, loop: Loop, folder: str = "", plans: int = 0) -> torch.Tensor:
    """Return all parameters after a run, or from one step to another of it.

    Args:
        rank: this process.
        loop: how it loops.
        folder: where the state is read from and written to, if it does not run from end to end.
        plans: seed of the sizes, which change after every step.
    """
    torch.manual_seed(3)
    model = Dropping().double()
    torch.manual_seed(100 + rank)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if loop.shards and world_size > 1:
        fully_shard(model.first)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    runtime = Runtime(
        line_every=None, sample_seed=loop.seed, claims=Hybrid(first=0.5) if loop.claims else "off"
    )
    with Balancer(
        policy="equal" if loop.costs else Restless(plans),
        bounds=Bounds(max=3) if loop.by_steps and not loop.costs else Bounds(),
        runtime=runtime,
        cost=LENGTHS if loop.costs else None,
    ) as balancer:
        wrapped, loader = balancer.prepare(model, _stock(loop, world_size, 0))
        others = [
            balancer.prepare(_stock(loop, world_size, number))
            for number in range(1, loop.num_loaders)
        ]
        parts = {"model": model, "optimizer": optimizer, "loader": loader}
        if loop.first:
            state = torch.load(f"{folder}/state", weights_only=True)
            for name, part in parts.items():
                part.load_state_dict(state[name])
        steps = _steps(loop, [loader, *others])
        if loop.last is not None:
            steps = islice(steps, loop.last - loop.first)
        for step in steps:
            for value in step:
                wrapped(value).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if loop.last is not None and rank == 0:
            torch.save({name: part.state_dict() for name, part in parts.items()}, f"{folder}/state")
    whole = [_whole(parameter.detach()) for parameter in model.parameters()]
    return nn.utils.parameters_to_vector(whole)


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def trained(rank: int, loops: dict[str, Loop], plans: int) -> dict[str, torch.Tensor]:
    """Return the parameters after each of several runs."""
    return {name: train(rank, loop, plans=plans) for name, loop in loops.items()}


def broken_off(rank: int, loop: Loop, folder: str) -> None:
    """Train up to the middle of the second epoch, and keep the state."""
    train(rank, replace(loop, last=6), folder, plans=1)


def resumed(rank: int, loop: Loop, folder: str) -> torch.Tensor:
    """Go on from there to the end, under other plans."""
    return train(rank, replace(loop, first=6), folder, plans=2)


def _stock(loop: Loop, world_size: int, number: int) -> DataLoader[Any]:
    return DataLoader(
        Noisy(),
        batch_size=GLOBAL // world_size,
        shuffle=True,
        generator=torch.Generator().manual_seed(2 + number),
        num_workers=loop.num_workers,
    )


def _steps(loop: Loop, loaders: list[Any]) -> Iterator[Any]:
    """Yield the batches of every step."""
    for epoch in range(2 if loop.first else 1, NUM_EPOCHS + 1):
        loader = loaders[(epoch - 1) % len(loaders)]
        if loop.by_steps:
            yield from loader.steps()
        elif loop.ahead:
            yield from _ahead(loader)
        else:
            yield from ([batch] for batch in loader)


def _ahead(loader: Any) -> Iterator[list[torch.Tensor]]:
    batches = iter(loader)
    held = next(batches)
    for batch in batches:
        yield [held.clone()]
        held = batch
    yield [held.clone()]
