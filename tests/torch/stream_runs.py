"""What the workers of the stream tests run."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from evenstep.torch import Balancer, Runtime

from .plans import Restless
from .stream_fakes import Numbers

QUIET = Runtime(line_every=None)
SIZE = 8


def row(number: int) -> torch.Tensor:
    """Return the features of a sample."""
    return torch.randn(4, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


class Rows(IterableDataset):
    """Features and number of every sample."""

    def __init__(self, numbers: Numbers) -> None:
        self.numbers = numbers

    def __iter__(self):
        return ((row(number), number) for number in self.numbers)


def model() -> nn.Module:
    """Return the same weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def gradient(module: nn.Module) -> torch.Tensor:
    """Return all gradients in one vector."""
    return torch.cat([parameter.grad.flatten() for parameter in module.parameters()]).clone()


def reference(numbers: list[int]) -> torch.Tensor:
    """Return the gradient of the mean over these samples, in one process."""
    alone = model()
    alone(torch.stack([row(number) for number in numbers])).square().mean().backward()
    return gradient(alone)


def steps(rank: int, kind: str, num_workers: int, cuts: bool) -> dict[str, Any]:
    """Return the samples of every step over all ranks, and the worst relative error."""
    numbers = Numbers(45) if kind == "same" else Numbers(100 * rank, 100 * rank + 12 + 9 * rank)
    stock = DataLoader(Rows(numbers), batch_size=4, num_workers=num_workers)
    found, errors = [], []
    with Balancer(policy=Restless(), runtime=QUIET) as balancer:
        ddp, loader = balancer.prepare(DistributedDataParallel(model()), stock, stream=kind)
        for step in loader.steps() if cuts else ([batch] for batch in loader):
            for x, _ in step:
                ddp(x).square().mean().backward()
            break  # what was said ahead of the next step is never heard
        for step in loader.steps() if cuts else ([batch] for batch in loader):
            ddp.zero_grad()
            mine = []
            for x, ids in step:
                ddp(x).square().mean().backward()
                mine += ids.tolist()[: balancer.num_samples]
            everybody: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everybody, mine)
            found.append([number for part in everybody for number in part])
            theirs = reference(found[-1])
            errors.append(float((gradient(ddp) - theirs).norm() / theirs.norm()))
        mean = balancer.mean(float(rank), count=rank)
    return {"steps": found, "error": max(errors), "mean": mean}


def unsaid(rank: int) -> str:
    """Return the error where nobody said who reads what."""
    try:
        Balancer(runtime=QUIET).prepare(model(), DataLoader(Numbers(8)))
    except ValueError as error:
        return str(error)
    return "no error"


def norms(rank: int) -> str:
    """Return the error for a model with BatchNorm on a stream with short steps."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            Balancer(runtime=QUIET).prepare(
                nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2)),
                DataLoader(Numbers(8)),
                stream="same",
            )
        except ValueError as error:
            return str(error)
    return "no error"
