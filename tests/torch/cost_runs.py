"""What the workers of the tests of plans by cost run, and one process beside them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

from evenstep.events import Rebalanced
from evenstep.torch import Balancer, Checkpoint, Cost, Runtime

NUM_SAMPLES, BATCH_SIZE = 24 * 6 + 2, 24  # the short last step has fewer samples than 3 ranks
LENGTH = np.random.default_rng(7).integers(2, 60, NUM_SAMPLES)
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Series(Dataset[tuple[int, torch.Tensor]]):
    """Rows of numbers of unlike lengths, each with its index."""

    def __init__(self, lengths: np.ndarray = LENGTH) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        generator = torch.Generator().manual_seed(int(index))
        size = int(self.lengths[index]), 4
        return index, torch.randn(size, generator=generator, dtype=torch.float64)


def lengths_in(samples: Sequence[tuple[int, torch.Tensor]], batch: Batch) -> list[int]:
    """Return lengths that no one has told before: half by the samples, half by their batch."""
    by_batch = batch[2].sum(1).long().tolist()
    return [len(values) if i % 2 else by_batch[i] for i, (_, values) in enumerate(samples)]


def padded(samples: Sequence[tuple[int, torch.Tensor]]) -> Batch:
    """Return samples padded to the longest, and a mask."""
    x = nn.utils.rnn.pad_sequence([values for _, values in samples], batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones(len(v)) for _, v in samples], batch_first=True)
    return torch.tensor([index for index, _ in samples]), x, mask.double()


class Masked(nn.Module):
    """Scores every position, and means over those that are no padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8).double(), nn.Linear(8, 1).double()

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = self.last(torch.tanh(self.first(x)))[..., 0]
        return (scores * mask).sum(1) / mask.sum(1)


class Scores(Masked):
    """The same, a score for every position."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))[..., 0] * mask


def loader_of(world_size: int, *, workers: int = 0) -> DataLoader[Any]:
    return DataLoader(
        Series(),
        batch_size=BATCH_SIZE // world_size,
        shuffle=True,
        num_workers=workers,
        collate_fn=padded,
        generator=torch.Generator().manual_seed(3),
    )


def loss_of(model: nn.Module, batch: Batch, *, tokens: bool) -> torch.Tensor:
    """Return the mean over samples, or over tokens."""
    _, x, mask = batch
    scores = model(x, mask).square()
    return scores.sum() / mask.sum() if tokens else scores.mean()


def num_tokens(batch: Batch) -> float:
    return float(batch[2].sum())


Found = tuple[torch.Tensor, list[list[int]], list[tuple[int, ...]]]


def train(
    rank: int,
    cost: Cost | None,
    *,
    world_size: int = 3,
    epochs: int = 2,
    kind: str = "plain",
    tokens: bool = False,
    workers: int = 0,
    folder: Path | None = None,
    stop_after: int | None = None,
) -> Found:
    """Train; return parameters, the samples that this rank had in each step, and the plans.

    Args:
        rank: this process.
        cost: of samples; None counts them.
        world_size: how many ranks there are.
        epochs: over the data set.
        kind: "plain", "steps" or "fsdp2".
        tokens: whether the loss is a mean over tokens.
        workers: of the loader.
        folder: of a checkpoint that is loaded, and saved after the last step.
        stop_after: steps, where not all are trained.
    """
    events: list[Any] = []
    runtime = Runtime(line_every=None, hooks=(events.append,))
    model: Any = Scores() if tokens else Masked()
    if kind == "fsdp2" and world_size > 1:
        fully_shard(model)
    unit: Any = num_tokens if tokens else "samples"
    with Balancer(cost=cost, unit=unit, runtime=runtime) as balancer:
        model, loader = balancer.prepare(model, loader_of(world_size, workers=workers))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        checkpoint = None
        if folder is not None:
            parts = {"model": model, "optimizer": optimizer, "loader": loader}
            checkpoint = Checkpoint(folder, **parts)
            checkpoint.load()
        seen: list[list[int]] = []
        every = (step for _ in range(epochs) for step in _steps(loader, kind))
        for step in islice(every, stop_after):
            mine: list[int] = []
            optimizer.zero_grad()
            for batch in step:
                if world_size > 1:  # ranks of unlike speeds, or plans would stay
                    sleep(num_tokens(batch) * (2e-4 if rank else 4e-4))
                loss_of(model, batch, tokens=tokens).backward()
                mine += batch[0].tolist() if balancer.num_samples else []
            optimizer.step()
            seen.append(mine)
        if checkpoint is not None:
            checkpoint.save(len(seen))
    values = [whole(p).flatten() for p in model.parameters()]
    plans = [event.batch_size for event in events if isinstance(event, Rebalanced)]
    return torch.cat(values), seen, plans


def _steps(loader: Any, kind: str) -> Any:
    return loader.steps() if kind != "plain" else ([batch] for batch in loader)


def whole(parameter: torch.Tensor) -> torch.Tensor:
    full = getattr(parameter, "full_tensor", None)
    return (parameter if full is None else full()).detach()
