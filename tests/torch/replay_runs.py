"""Training runs whose plans are recorded, and repeated, for the tests of ``Replay``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from evenstep.policies import AbstractPolicy, Replay
from evenstep.torch import Balancer, Bounds, Runtime

from .plans import Restless

WORLD_SIZE, GLOBAL, NUM_SAMPLES = 3, 24, 24 * 5 + 7  # five full steps in an epoch, and a short one
NUM_EPOCHS = 3


@dataclass(frozen=True)
class Loop:
    """How a script loops.

    Attributes:
        by_steps: whether it takes micro-batches.
        num_workers: processes that fetch ahead.
        num_loaders: that take turns, one epoch each.
        cut_at: steps after which the script ends; None is never.
        saves, loads: where the state is written to at the end, and read from at the beginning.
    """

    by_steps: bool = False
    num_workers: int = 0
    num_loaders: int = 1
    cut_at: int | None = None
    saves: str | None = None
    loads: str | None = None


def train(
    rank: int, loop: Loop, folder: str, replayed: str | None, seed: int = 0
) -> tuple[list[tuple[int, ...]], bytes]:
    """Return all sizes of a run and the bits of its parameters.

    Args:
        rank: this process.
        loop: how it loops.
        folder: where it is recorded.
        replayed: the record of the run that it repeats; None draws new sizes after every step.
        seed: of those sizes.
    """
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(3)
    policy: AbstractPolicy[Any] = Restless(seed) if replayed is None else Replay(Path(replayed))
    plain = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    bounds = Bounds(max=4) if loop.by_steps else Bounds()
    runtime = Runtime(line_every=None, run_dir=folder)
    sizes = []
    with Balancer(policy=policy, bounds=bounds, runtime=runtime) as balancer:
        model, first = balancer.prepare(plain, _stock(loop, 1))
        others = [balancer.prepare(_stock(loop, 2 + n)) for n in range(loop.num_loaders - 1)]
        stateful = {"model": model, "optimizer": optimizer, "loader": first, "balancer": balancer}
        if loop.loads is not None:
            state = torch.load(f"{loop.loads}-{rank}", weights_only=True)
            for name, part in stateful.items():
                part.load_state_dict(state[name])
        for parts in islice(_steps(loop, [first, *others]), loop.cut_at):
            for x, y in parts:
                nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            sizes.append(balancer.batch_sizes)
        if loop.saves is not None:
            state = {name: part.state_dict() for name, part in stateful.items()}
            torch.save(state, f"{loop.saves}-{rank}")
    bits = torch.cat([parameter.detach().flatten() for parameter in plain.parameters()])
    return sizes, bits.numpy().tobytes()


def _steps(loop: Loop, loaders: list[Any]) -> Iterator[Any]:
    """Yield the batches of every step."""
    for epoch in range(NUM_EPOCHS):
        loader = loaders[epoch % len(loaders)]
        yield from loader.steps() if loop.by_steps else ([batch] for batch in loader)


def _stock(loop: Loop, seed: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(NUM_SAMPLES, 6, generator=generator)
    samples = TensorDataset(x, x.sum(1, keepdim=True).sin())
    return DataLoader(
        samples,
        batch_size=GLOBAL // WORLD_SIZE,
        shuffle=True,
        generator=generator,
        num_workers=loop.num_workers,
    )
