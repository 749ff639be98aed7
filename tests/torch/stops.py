"""What the workers of the stop tests run: one is stopped, is killed, or hangs at a given point."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

from evenstep.exceptions import WorkerLostError
from evenstep.torch import Balancer, Checkpoint, Runtime

IMPATIENT = Runtime(deadline_s=1.5, heartbeat_s=0.2, hang_s=2.0, line_every=None)
Strike = Callable[[str], None]
HANG = None  # in the place of a signal


class Reading(Dataset[tuple[torch.Tensor, ...]]):
    """A data set of which a rank may be struck at each sample."""

    def __init__(self, data: TensorDataset, strike: Strike, point: str) -> None:
        self._data, self._strike, self._point = data, strike, point

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        self._strike(self._point)
        return self._data[index]


class Buffered(nn.Module):
    """A layer with a buffer, which DDP broadcasts in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output."""
        output: torch.Tensor = self.layer(x)
        return output


def train(balancer: Balancer, folder: str, strike: Strike) -> None:
    """Pass every point once, in a script as people write it."""
    model: Any = DistributedDataParallel(Buffered())
    data = TensorDataset(torch.randn(72, 4))
    read = Reading(data, strike, "prepare")
    model, loader = balancer.prepare(model, DataLoader(read, batch_size=4))
    read._point = "data set"
    shown = Reading(data, strike, "data set of evaluation")
    held_out = balancer.prepare_eval(DataLoader(shown, batch_size=4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoint = Checkpoint(folder, model=model, optimizer=optimizer, loader=loader)
    strike("before the loop")
    dist.barrier()
    for step, (x,) in enumerate(loader):
        strike(f"forward {step}")
        loss = model(x).square().mean()
        strike(f"backward {step}")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            strike("mean")
            balancer.mean(loss.detach())
            strike("barrier")
            dist.barrier()
            strike("save")
            checkpoint.save(step)
            strike("evaluation")
            with torch.no_grad():
                balancer.mean(sum(model(y).mean() for (y,) in held_out) / len(held_out))


def hang() -> None:
    """Never return, in Python."""
    while True:
        sleep(3600)


def struck(
    rank: int, folder: str, point: str, victim: int, sent: signal.Signals | None
) -> tuple[str, bool, float]:
    """Return what a rank ended with, whether its ``finally`` ran, and in how many seconds."""
    torch.manual_seed(0)
    began_s, cleaned, told = monotonic(), False, "nothing happened"

    def strike(here: str) -> None:
        nonlocal began_s
        if here == point:
            began_s = monotonic()
            if rank == victim and sent is HANG:
                hang()
            elif rank == victim:
                os.kill(os.getpid(), sent)

    try:
        with Balancer(runtime=IMPATIENT) as balancer:
            try:
                train(balancer, folder, strike)
            finally:
                cleaned = True
    except WorkerLostError as error:
        told = str(error)
    return told, cleaned, monotonic() - began_s
