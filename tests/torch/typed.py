"""Loops as a user writes them who has types checked strictly; nothing here is ever run."""

from typing import assert_type

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

from evenstep.policies import Lbb
from evenstep.torch import BalancedLoader, Balancer, Bounds, Checkpoint, Drain, Runtime
from evenstep.torch._data.loaders._eval import EvalLoader

Sample = tuple[Tensor, Tensor]


class Net(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(dim=1)


def plain(dataset: Dataset[Sample], held_out: Dataset[Sample]) -> float:
    model = DDP(nn.Linear(8, 1))
    loader = DataLoader(dataset, batch_size=8, shuffle=True)
    validation = DataLoader(held_out, batch_size=64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    balancer = Balancer(policy=Lbb(), bounds=Bounds(max=12), runtime=Runtime(line_every=None))
    model, loader = balancer.prepare(model, loader)
    validation = balancer.prepare_eval(validation)
    assert_type(model, DDP)
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]  # so it is in torch
        optimizer.step()
        optimizer.zero_grad()
        print(balancer.mean(loss), balancer.num_samples)
    for x, y in validation:
        validation.add("loss", nn.functional.mse_loss(model(x), y))
    print(len(loader), sum(balancer.batch_sizes), loader.batch_size)
    return validation.mean()["loss"]


def micro(net: Net, loader: DataLoader[Sample]) -> int:
    with Balancer() as balancer, Drain(balancer) as drain:
        model, batches = balancer.prepare(net, loader, weighting="output")
        checkpoint = Checkpoint("runs", model=model, loader=batches, balancer=balancer)
        assert_type(model, Net)
        number = checkpoint.load() or 0
        for step in batches.steps():
            for x, _ in step:
                model(x).mean().backward()
            number += 1
            if drain.requested:
                break
        balanced: BalancedLoader = batches
    return len(balanced) + number


def in_parts(net: Net, loader: DataLoader[Sample]) -> EvalLoader:
    balancer = Balancer()
    model = balancer.prepare(net)
    batches = balancer.prepare(loader)
    assert_type(model, Net)
    print(len(batches.dataset), batches.state_dict())
    return balancer.prepare_eval(loader)
