"""Short training runs for the tests of the balancer."""

from __future__ import annotations

import warnings
from time import sleep
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from evenstep.policies import Fixed
from evenstep.torch import Balancer, Bounds, Runtime

QUIET = Runtime(line_every=None)


class Card:
    """A device with room for ``num_samples`` samples, whose model is as large as two."""

    def __init__(self, num_samples: float) -> None:
        self.room = int(1000 * (num_samples + 2) / 0.9)  # a tenth is left free, as on a real one
        self.peak = 0

    def capacity_bytes(self) -> int:
        return self.room

    def peak_bytes(self) -> int:
        return self.peak

    def reset(self) -> None:
        self.peak = 0


class Sleepy(nn.Module):
    """A layer that takes its time, and memory on ``card``."""

    def __init__(self, seconds_per_sample: float, card: Card | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seconds_per_sample = seconds_per_sample
        self.card = card

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.card is not None:
            self.card.peak = max(self.card.peak, 1000 * (len(x) + 2))
            assert self.card.peak <= self.card.room, "out of memory"
        sleep(len(x) * self.seconds_per_sample)
        return self.layer(x)


FAST_S, SLOW_S = 0.0004, 0.004  # a sample's seconds on rank 0 and on the others


def with_memory(rank: int) -> list[tuple[int, ...]]:
    """Return all sizes of a run of three workers; by its speed, rank 0 would take 40 of the 48."""
    card = Card(1.4 * 16 if rank == 0 else 1000)
    model = Sleepy(SLOW_S if rank else FAST_S, card)
    samples = TensorDataset(torch.randn(48 * 12, 4))
    sizes = []
    runtime = Runtime(line_every=None, memory=card)
    with Balancer(runtime=runtime) as balancer:
        model, loader = balancer.prepare(model, DataLoader(samples, batch_size=16))
        for (x,) in loader:
            sizes.append(balancer.batch_sizes)
            model(x).mean().backward()
    return sizes


def blind(rank: int) -> list[str]:
    """Return the warnings of a run that was told to weight losses, and forgets to."""
    samples = TensorDataset(torch.randn(80, 4))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Balancer(runtime=QUIET) as balancer:
            stock = DataLoader(samples, batch_size=4)
            model, loader = balancer.prepare(nn.Linear(4, 4), stock, weighting="loss")
            for (x,) in loader:
                model(x).mean().backward()
    return [str(warning.message) for warning in caught]


def short(rank: int) -> list[tuple[int, int]]:
    """Return rows and samples of every step of a data set shorter than one global batch."""
    steps = []
    samples = TensorDataset(torch.randn(3, 4))
    with Balancer(runtime=QUIET) as balancer:
        model, loader = balancer.prepare(nn.Linear(4, 4), DataLoader(samples, batch_size=8))
        for _ in range(2):
            for (x,) in loader:
                model(x).mean().backward()
                steps.append((len(x), balancer.num_samples))
    return steps


def micro_batches(rank: int) -> tuple[list[list[int]], list[float]]:
    """Return the sizes of all micro-batches, and how far each gradient is from one process'."""
    torch.manual_seed(0)
    x = torch.randn(40, 4, dtype=torch.float64)
    model = DistributedDataParallel(nn.Linear(4, 4).double())
    alone = nn.Linear(4, 4).double()
    alone.load_state_dict(model.module.state_dict())
    policy = Fixed((14, 6))
    cuts, differences = [], []
    with Balancer(policy=policy, bounds=Bounds(max=5), runtime=QUIET) as balancer:
        model, loader = balancer.prepare(model, DataLoader(TensorDataset(x), batch_size=10))
        for number, step in enumerate(loader.steps()):
            model.zero_grad()
            alone.zero_grad()
            sizes = []
            for (part,) in step:
                sizes.append(len(part))
                (model(part) ** 2).mean().backward()
            (alone(x[20 * number : 20 * number + 20]) ** 2).mean().backward()
            cuts.append(sizes)
            theirs, mine = alone.weight.grad, model.module.weight.grad
            differences.append(float((mine - theirs).norm() / theirs.norm()))
    return cuts, differences


def logged_mean(rank: int) -> list[float]:
    """Return the mean over samples of a value that is 1 on rank 0 and 5 on rank 1."""
    samples = TensorDataset(torch.randn(4, 4))
    means = []
    with Balancer(policy=Fixed((3, 1)), runtime=QUIET) as balancer:
        model, loader = balancer.prepare(nn.Linear(4, 4), DataLoader(samples, batch_size=2))
        for (x,) in loader:
            model(x).mean().backward()
            means.append(balancer.mean(torch.tensor(1.0 + 4.0 * rank)))
    return means


def learn(rank: int) -> dict[str, Any]:
    """Train a plain module on shuffled samples for a few epochs."""
    torch.manual_seed(rank)  # DDP makes the ranks start alike
    plain = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 4, generator=generator)
    samples = TensorDataset(x, x.sum(1, keepdim=True))
    losses = []
    with Balancer(runtime=QUIET) as balancer:
        stock = DataLoader(samples, batch_size=8, shuffle=True)
        model, loader = balancer.prepare(plain, stock)
        for _ in range(4):
            for inputs, targets in loader:
                loss = nn.functional.mse_loss(model(inputs), targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(balancer.mean(loss))
    return {
        "same objects": model.module is plain,
        "type": type(model).__name__,
        "weight": plain.weight.detach(),
        "first loss": losses[0],
        "loss": losses[-1],
    }
