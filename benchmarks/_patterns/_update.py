"""The lines that all loops share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the mean loss over a batch."""
    return functional.mse_loss(model(x), y)


def update(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> None:
    """Train on one batch of features and targets."""
    x, y = batch
    optimizer.zero_grad()
    loss_of(model, x, y).backward()
    optimizer.step()
