"""A short run of two workers, one ten times as fast as the other, which writes its events."""

from __future__ import annotations

from time import sleep

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from evenstep.torch import Balancer, Runtime


class Sleepy(nn.Module):
    """A layer that takes its time."""

    def __init__(self, seconds_per_sample: float) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seconds_per_sample = seconds_per_sample

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sleep(len(x) * self.seconds_per_sample)
        return self.layer(x)


def trained(rank: int, folder: str) -> None:
    """Train for a few steps."""
    model = Sleepy(0.005 if rank else 0.0005)
    stock = DataLoader(TensorDataset(torch.randn(32 * 10 + 5, 4)), batch_size=16)
    with Balancer(runtime=Runtime(line_every=None, run_dir=folder)) as balancer:
        model, loader = balancer.prepare(model, stock)
        for (x,) in loader:
            model(x).square().mean().backward()
