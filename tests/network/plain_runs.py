"""A plain run, in a module that imports nothing of unequal links."""

from __future__ import annotations

import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

from evenstep.torch import Balancer, Runtime


def loaded_by_training(rank: int) -> list[str]:
    """Return which modules of unequal links are loaded after a run without a network."""
    stock = DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=4)
    with Balancer(runtime=Runtime(line_every=None)) as balancer:
        model, loader = balancer.prepare(torch.nn.Linear(4, 1), stock)
        for (x,) in loader:
            model(x).square().mean().backward()
    return [name for name in sys.modules if name.startswith("evenstep.network")]
