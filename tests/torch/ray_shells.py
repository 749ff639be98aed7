"""What the workers of the tests of Ray Train's wrapper around loaders run."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from evenstep.torch import Balancer, Runtime

from .models import Mlp
from .plans import Restless

QUIET = Runtime(line_every=None)
NUM_SAMPLES, BATCH_SIZE, EPOCHS = 50, 6, (3, 0)


class RayShell(DataLoader):
    """What `ray.train.torch.prepare_data_loader` returns, as far as evenstep looks at it."""

    def __init__(self, loader: DataLoader, device: str) -> None:
        self.__dict__.update(loader.__dict__)
        self._dataloader = loader
        self.device = torch.device(device)
        self._auto_transfer = False

    def __iter__(self) -> Any:
        raise AssertionError("Ray's own iteration is that of one rank's shard")


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_SAMPLES, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(5, (NUM_SAMPLES,), generator=generator))


def sharded(device: str = "cpu") -> RayShell:
    data = samples()
    return RayShell(DataLoader(data, BATCH_SIZE, sampler=DistributedSampler(data)), device)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return Mlp().double()


def parameters(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def trained(rank: int, world_size: int) -> dict[str, Any]:
    """Train as Ray's example does, telling the sampler its epoch; return how far it is off."""
    model, alone = mlp(), mlp()
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone))
    with Balancer(policy=Restless(), runtime=QUIET) as balancer:
        prepared, loader = balancer.prepare(model, sharded())
        for epoch in EPOCHS:
            loader.sampler.set_epoch(epoch)
            for x, y in loader:
                optimizer.zero_grad()
                functional.cross_entropy(prepared(x), y).backward()
                optimizer.step()
    data = samples()
    for epoch in EPOCHS:
        order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(BATCH_SIZE * world_size):
            x, y = data[batch]
            other.zero_grad()
            functional.cross_entropy(alone(x), y).backward()
            other.step()
    return {"error": float((parameters(model) - parameters(alone)).norm()), "length": len(loader)}


def moved(rank: int) -> dict[str, Any]:
    """Return the devices of batches, and how many samples were evaluated on this rank."""
    devices, count = set(), 0
    with Balancer(policy=Restless(), runtime=QUIET) as balancer:
        model, loader = balancer.prepare(mlp(), sharded("meta"))
        for x, _ in loader:
            devices.add(x.device.type)
            model(torch.zeros(len(x), 6, dtype=torch.float64)).mean().backward()
        evaluation = balancer.prepare_eval(sharded("meta"))
        for x, _ in evaluation:
            devices.add(x.device.type)
            count += evaluation.count
    return {"devices": devices, "evaluated": count}


class Shard:
    """An iterator of Ray Data's, as far as evenstep looks at it."""

    def iter_rows(self) -> Any:
        yield from ()


def refused(rank: int) -> str:
    """Return what is said of a shard in place of a loader."""
    with Balancer(runtime=QUIET) as balancer:
        try:
            balancer.prepare(mlp(), Shard())
        except ValueError as error:
            return str(error)
    return ""
