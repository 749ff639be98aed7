"""What the workers of the fault tests run: one of them dies or is stopped in the middle."""

from __future__ import annotations

import logging
import os
import signal
from time import monotonic, sleep

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from evenstep.exceptions import WorkerLostError
from evenstep.torch import Balancer, Runtime

WATCHFUL = Runtime(deadline_s=1.5, heartbeat_s=0.2, line_every=None)


class Failing(nn.Module):
    """A layer that takes its time, and whose third forward may be the last."""

    def __init__(self, sent: signal.Signals | None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.sent = sent
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        sleep(0.05 if self.sent is None else 0.1)  # the victim is the slowest: others wait for it
        if self.count == 3 and self.sent is not None:
            os.kill(os.getpid(), self.sent)
        return self.layer(x)


def train(rank: int, victim: int, sent: signal.Signals) -> tuple[str, int, float]:
    """Return what ended training on this rank: the error's text, whom it names, seconds."""
    model = DistributedDataParallel(Failing(sent if rank == victim else None))
    balancer = Balancer(runtime=WATCHFUL)
    dataset = TensorDataset(torch.randn(96, 4))
    model, loader = balancer.prepare(model, DataLoader(dataset, batch_size=4))
    began_s = monotonic()
    try:
        for (x,) in loader:
            began_s = monotonic()
            model(x).sum().backward()
    except WorkerLostError as error:
        return str(error), error.rank, monotonic() - began_s
    return "nothing happened", -1, 0.0


def hang_in_the_all_reduce(rank: int, folder: str) -> None:
    """Rank 2 stops once its report is out and its part of the all-reduce is not."""
    handler = logging.FileHandler(f"{folder}/{rank}.log")
    logging.getLogger("evenstep").addHandler(handler)
    model = DistributedDataParallel(nn.Linear(4, 4))
    balancer = Balancer(runtime=WATCHFUL)
    dataset = TensorDataset(torch.randn(96, 4))
    model, loader = balancer.prepare(model, DataLoader(dataset, batch_size=4))
    for step, (x,) in enumerate(loader):
        if (rank, step) == (2, 2):
            with model.no_sync():
                model(x).sum().backward()
            os.kill(os.getpid(), signal.SIGSTOP)
        model(x).sum().backward()


def leave_early(rank: int) -> str:
    """Rank 1 ends its run two steps before the others; return what they are told."""
    model = DistributedDataParallel(nn.Linear(4, 4))
    dataset = TensorDataset(torch.randn(48, 4))
    try:
        with Balancer(runtime=WATCHFUL) as balancer:
            model, loader = balancer.prepare(model, DataLoader(dataset, batch_size=4))
            for step, (x,) in enumerate(loader):
                if rank == 1 and step == 2:
                    return "left"
                model(x).sum().backward()
    except WorkerLostError as error:
        return str(error)
    return "nothing happened"
