"""What the workers run whose sampler on rank 0, or whose stream on the last rank, falls silent."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from time import monotonic
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from evenstep.exceptions import WorkerLostError
from evenstep.torch import Balancer

from .stops import IMPATIENT, hang


class Silent:
    """A sampler that never answers in its second epoch, or from the first on."""

    def __init__(self, num_epochs: int) -> None:
        self.num_epochs = num_epochs

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        if self.num_epochs == 0:
            hang()
        self.num_epochs -= 1
        yield from range(8)


class Shard(IterableDataset[float]):
    """A rank's own samples, which may never come."""

    def __init__(self, *, hangs: bool) -> None:
        self.hangs = hangs

    def __iter__(self) -> Iterator[float]:
        if self.hangs:
            hang()
        yield from range(6)


def waited(rank: int, kind: str) -> tuple[str, bool, float]:
    """Return what a rank ended with, whether its ``finally`` ran, and in how many seconds."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    told, cleaned, began_s = "nothing happened", False, monotonic()
    model = DistributedDataParallel(nn.Linear(1, 1))
    options: dict[str, Any] = {}
    if kind == "stream":
        loader, options = DataLoader(Shard(hangs=rank == 2)), {"stream": "sharded"}
    else:
        sampler = Silent(9)
        loader = DataLoader(torch.arange(8.0).tolist(), sampler=sampler)
    try:
        with Balancer(runtime=IMPATIENT) as balancer:
            model, loader = balancer.prepare(model, loader, **options)
            if kind != "stream":
                sampler.num_epochs = int(kind == "second epoch")
            try:
                for _ in range(2):
                    for batch in loader:
                        model(batch.float().reshape(-1, 1)).mean().backward()
                    began_s = monotonic()
            finally:
                cleaned = True
    except WorkerLostError as error:
        told = str(error)
    return told, cleaned, monotonic() - began_s
