"""Workers whose compute is emulated by sleeping: their true times are known, and cost no core."""

from __future__ import annotations

from time import perf_counter, sleep

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


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


def sleeper(intercept_s: float, slope_s: float, *, width: int) -> DistributedDataParallel:
    """Return a sleeper in DDP."""
    return DistributedDataParallel(Sleeper(intercept_s, slope_s, width=width))


def loader_of(num_steps: int, batch_size: int, world_size: int, *, width: int) -> DataLoader:  # type: ignore[type-arg]
    """Return a stock loader with enough samples for ``num_steps`` global steps."""
    return DataLoader(
        TensorDataset(torch.zeros(num_steps * batch_size * world_size, width)),
        batch_size=batch_size,
    )


def aligned_all_reduce_s(width: int, *, repetitions: int = 30) -> list[float]:
    """Return seconds of an all-reduce of the layer's gradient, all ranks starting together."""
    gradient = torch.zeros(width * width + width)
    seconds = []
    for _ in range(repetitions):
        dist.barrier()
        began_s = perf_counter()
        dist.all_reduce(gradient)
        seconds.append(perf_counter() - began_s)
    return seconds
