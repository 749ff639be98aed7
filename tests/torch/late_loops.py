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


def said_of(name: str, begin: int) -> list[str]:
    """Return what is said of a loop of 14 steps in which something begins at a step."""
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
            has_begun = step >= begin
            loss = ddp(x).square().mean()
            if name == "part" and has_begun:
                loss = loss + ddp.module[0](x).abs().mean()
            if name == "backward" and has_begun:
                loss.backward(retain_graph=True)
            loss.backward()
            optimizers[0].step()
            if name == "critic" and has_begun:
                critic(x).square().mean().backward()
                optimizers[1].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
    return [str(one.message) for one in caught if one.category is EvenstepWarning]


def warnings_of_late(rank: int) -> dict[str, list[str]]:
    """Return what is said of loops in which something begins after the first steps."""
    return {name: said_of(name, 6) for name in ("critic", "part", "neither")}


def warnings_between_looks(rank: int) -> dict[str, list[str]]:
    """Return what is said of what begins at step 11, when no look is due before step 16."""
    return {name: said_of(name, 11) for name in ("critic", "backward", "part")}
