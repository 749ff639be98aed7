"""Loops in which something begins after the first steps."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evenstep.exceptions import EvenstepWarning
from evenstep.policies import Fixed
from evenstep.torch import Balancer, Runtime

from .loops import BATCH_SIZE, model, stock


def warnings_of_late(rank: int) -> dict[str, list[str]]:
    """Return what is said of loops in which something begins after the first steps."""
    said = {}
    for name in ("critic", "part", "neither"):
        runtime = Runtime(line_every=None, deadline_s=6.0)
        critic = DistributedDataParallel(nn.Linear(4, 2).double())
        with (
            Balancer(policy=Fixed((14, 6)), runtime=runtime) as balancer,
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            parts = DistributedDataParallel(model()), stock(14 * 2 * BATCH_SIZE)
            ddp, loader = balancer.prepare(*parts)
            optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (ddp, critic)]
            for step, (x, _) in enumerate(loader):
                loss = ddp(x).square().mean()
                if name == "part" and step >= 6:
                    loss = loss + ddp.module[0](x).abs().mean()
                loss.backward()
                optimizers[0].step()
                if name == "critic" and step >= 6:
                    critic(x).square().mean().backward()
                    optimizers[1].step()
                for optimizer in optimizers:
                    optimizer.zero_grad()
        said[name] = [str(one.message) for one in caught if one.category is EvenstepWarning]
    return said
