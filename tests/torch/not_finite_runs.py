"""Loops in which the loss of some rank is not finite, run by the workers of a small cluster."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from evenstep.events import Event, LossNotFinite
from evenstep.policies import Fixed
from evenstep.torch import Balancer, Bounds, Runtime

STEPS = 24


class Halved(nn.Module):
    """A model whose output is in half precision, as under autocast.

    Args:
        dtype: of the output.
    """

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 1)
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).to(self.dtype)


class Judging(nn.Module):
    """A model that returns its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).square().mean()


def events_of(
    rank: int,
    train: Callable[[int, Balancer, Callable[[], DataLoader[Any]]], None],
    *,
    sizes: tuple[int, ...] | None = None,
    **settings: Any,
) -> tuple[list[LossNotFinite], list[str]]:
    """Return what rank 0 heard of losses, and what its log says."""
    heard: list[Event] = []
    logged: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record.getMessage())

    logging.getLogger("evenstep").addHandler(Keep())
    world = dist.get_world_size()
    x = torch.randn(4 * world * STEPS, 3, generator=torch.Generator().manual_seed(0))

    def loader() -> DataLoader[Any]:
        return DataLoader(TensorDataset(x), batch_size=4)

    runtime = Runtime(line_every=None, hooks=(heard.append,))
    policy = Fixed(sizes or (4,) * world)
    with Balancer(policy=policy, runtime=runtime, **settings) as balancer:
        train(rank, balancer, loader)
    return [event for event in heard if isinstance(event, LossNotFinite)], logged


def with_nan(
    rank: int, guilty: tuple[int, ...] = (1,), model: str = "plain", stop: int = STEPS
) -> Any:
    """The loss of some ranks is NaN in step 3 alone; parameters keep it."""

    def train(rank: int, balancer: Balancer, loader: Callable[[], DataLoader[Any]]) -> None:
        kinds = {"plain": nn.Linear(3, 1), "judge": Judging(), "by hand": nn.Linear(3, 1)}
        weighting = "loss" if model == "by hand" else "output"
        net, batches = balancer.prepare(kinds[model], loader(), weighting=weighting)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for step, (x,) in enumerate(batches):
            optimizer.zero_grad()
            if step == 3 and rank in guilty:
                x = x * float("nan")
            out = net(x)
            loss = out if model == "judge" else out.square().mean()
            (balancer.weight(loss) if weighting == "loss" else loss).backward()
            optimizer.step()
            if step + 1 == stop:
                break

    return events_of(rank, train)


def with_accumulation(rank: int) -> Any:
    """Two models and micro-batches: the second one's loss is NaN in the first half of step 3."""

    def train(rank: int, balancer: Balancer, loader: Callable[[], DataLoader[Any]]) -> None:
        one, other, batches = balancer.prepare(nn.Linear(3, 1), nn.Linear(3, 1), loader())
        models = [*one.parameters(), *other.parameters()]
        optimizer = torch.optim.SGD(models, lr=0.01)
        for number, step in enumerate(batches.steps()):
            optimizer.zero_grad()
            for index, (x,) in enumerate(step):
                bad = number == 3 and index == 0 and rank == 1
                one(x).square().mean().backward()
                other(x * float("nan") if bad else x).square().mean().backward()
            optimizer.step()

    return events_of(rank, train, bounds=Bounds(max=2))


def with_scaler(rank: int, scale: float, half: bool) -> Any:
    """A loss scale that is too large on rank 1, until it has halved some times."""

    def train(rank: int, balancer: Balancer, loader: Callable[[], DataLoader[Any]]) -> None:
        dtype = torch.float16 if half else torch.float32
        net, batches = balancer.prepare(Halved(dtype), loader())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for (x,) in batches:
            optimizer.zero_grad()
            factor = (1.0 if half else 2.0) if rank == 1 else 2.0**-40
            scaler.scale(factor * net(x).float().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() <= scale / 2**3

    return events_of(rank, train, loss_reduction="sum")


def with_stand_in(rank: int) -> Any:
    """Rank 1 has no samples: its stand-in of weight 0 gives a mean over nothing."""

    def train(rank: int, balancer: Balancer, loader: Callable[[], DataLoader[Any]]) -> None:
        net, batches = balancer.prepare(nn.Linear(3, 1), loader())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        nothing = 0
        for (x,) in batches:
            optimizer.zero_grad()
            counts = balancer.num_samples
            nothing += not counts
            (net(x).square().sum() / torch.tensor(float(counts))).backward()
            optimizer.step()
        assert (nothing > 0) == (rank == 1), nothing

    return events_of(rank, train, sizes=(8, 0), bounds=Bounds(min=0))
