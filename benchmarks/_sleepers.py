"""Workers whose compute is emulated by sleeping: their true times are known, and cost no core."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter, sleep
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Due(torch.autograd.Function):
    """The identity; its gradient is there when ``ready`` returns."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ready: Callable[[], object]) -> torch.Tensor:
        """Return ``x``."""
        ctx.ready = ready
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the gradient, in due time."""
        ctx.ready()
        return gradients[0], None


class Sleeper(nn.Module):
    """A linear layer whose forward ends no sooner than ``intercept_s + slope_s * samples``.

    Args:
        intercept_s: seconds that a step costs before its first sample.
        slope_s: seconds that each sample adds.
        width: the layer has ``width ** 2`` weights, the gradient that is reduced.
    """

    def __init__(self, intercept_s: float, slope_s: float, *, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(width, width)
        self.intercept_s = intercept_s
        self.slope_s = slope_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, in due time."""
        end_s = perf_counter() + self.intercept_s + self.slope_s * len(x)
        y: torch.Tensor = self.layer(x)
        sleep(max(0.0, end_s - perf_counter()))
        return y


def loader_of(num_steps: int, batch_size: int, world_size: int, *, width: int) -> DataLoader:  # type: ignore[type-arg]
    """Return a stock loader with enough samples for ``num_steps`` global steps."""
    return DataLoader(
        TensorDataset(torch.zeros(num_steps * batch_size * world_size, width)),
        batch_size=batch_size,
    )
