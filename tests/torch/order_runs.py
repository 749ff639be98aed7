"""What the workers run that train on orders in blocks, and look at who says what to whom."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, RandomSampler

from evenstep.torch import Balancer, Runtime

from .stream_fakes import Numbers
from .stream_runs import Rows

QUIET = Runtime(line_every=None)
SIZE = 512
LENGTH = 3 * 64 * SIZE  # three blocks


class Values(Dataset):
    """Samples that are numbers."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return list(torch.tensor(indices, dtype=torch.float32).unsqueeze(1))


class Breaking:
    """A sampler whose data base goes away late in the epoch."""

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self):
        yield from range(2 * LENGTH // 3 + 5)
        raise ConnectionError("the table of the samples is gone")


def break_late(rank: int) -> tuple[int, str]:
    """Return after how many steps the loop ended, and with which words."""
    stock = DataLoader(Values(LENGTH), batch_size=SIZE // 2, sampler=Breaking())
    model = DistributedDataParallel(nn.Linear(1, 1))
    num_steps = 0
    with Balancer(runtime=QUIET) as balancer:
        model, loader = balancer.prepare(model, stock)
        try:
            for batch in loader:
                model(batch).mean().backward()
                num_steps += 1
        except (ConnectionError, RuntimeError) as error:
            return num_steps, f"{type(error).__name__}: {error}"
    return num_steps, "nothing happened"


def collectives_in_next(rank: int, kind: str) -> tuple[int, set[int]]:
    """Return the steps of two epochs, and how many collectives their fetches made."""
    stock: DataLoader[Any]
    options: dict[str, Any] = {}
    if kind == "order":
        data = Values(LENGTH)
        sampler = RandomSampler(data, replacement=True, num_samples=2 * LENGTH // 3)
        stock = DataLoader(data, batch_size=SIZE // 2, sampler=sampler)
    else:
        first = 0 if kind == "same" else 100 * rank
        stock = DataLoader(Rows(Numbers(first, first + 40)), batch_size=4)
        options = {"stream": kind}
    model = DistributedDataParallel(nn.Linear(1 if kind == "order" else 4, 1))
    model = model if kind == "order" else model.double()
    counts = set()
    with Balancer(runtime=QUIET) as balancer:
        model, loader = balancer.prepare(model, stock, **options)
        groups = [balancer._side._group, dist.group.WORLD]
        num_steps = 0
        for _ in range(2):
            batches = iter(loader)
            while True:
                before = [group._get_sequence_number_for_group() for group in groups]
                batch = next(batches, None)
                after = [group._get_sequence_number_for_group() for group in groups]
                counts |= {new - old for new, old in zip(after, before, strict=True)}
                if batch is None:
                    break
                model(batch if kind == "order" else batch[0]).mean().backward()
                num_steps += 1
    return num_steps, counts


def leave_before_the_order(rank: int) -> str:
    """Rank 0 ends its run where rank 1 begins another epoch; return what rank 1 heard."""
    model = DistributedDataParallel(nn.Linear(1, 1))
    with Balancer(runtime=QUIET) as balancer:
        model, loader = balancer.prepare(model, DataLoader(Values(8), batch_size=2))
        try:
            for _ in range(1 + rank):
                for batch in loader:
                    model(batch).mean().backward()
        except RuntimeError as error:
            return str(error)
    return "left"
