"""Training with emulated devices whose phases are noted: plain and balanced, the same samples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter, process_time, sleep
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmarks._sleepers import Due
from evenstep._diagnosis import Phase
from evenstep.torch import Balancer, Runtime

NUM_RANKS, BATCH = 4, 8  # samples of a rank
SPEEDS = {"equal": (1, 1, 1, 1), "1:1:2:4": (1, 1, 2, 4)}
START_S, TOKEN_S = 0.010, 110e-6  # of a rank of mean speed
MEAN = 200  # tokens of a sample
_FORWARD = 1 / 3  # of a device's time
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Cell:
    """One kind of training.

    Attributes:
        speeds: of the ranks, by name.
        lengths: ``"equal"`` or ``"unequal"``.
        curve: what a sample of mean length costs in its quadratic part, over its linear one.
        delay_s: what rank 0 does in every forward beside.
    """

    speeds: str
    lengths: str
    curve: float = 0.0
    delay_s: float = 0.0

    def __str__(self) -> str:
        more = f", attention {self.curve:g} of the linear part" if self.curve else ""
        more += f", rank 0 does {1000 * self.delay_s:g} ms beside" if self.delay_s else ""
        return f"speeds {self.speeds}, lengths {self.lengths}{more}"

    def tokens(self, num: int) -> np.ndarray:
        """Return how many tokens samples have."""
        if self.lengths == "equal":
            return np.full(num, MEAN)
        return np.clip(np.random.default_rng(7).gamma(1.5, MEAN / 1.5, num), 8, 1000).astype(int)

    def seconds(self, rank: int, tokens: np.ndarray) -> float:
        """Return the device's time for a batch."""
        speed = np.array(SPEEDS[self.speeds])
        work = tokens + self.curve * tokens**2 / MEAN
        return float((START_S + TOKEN_S * work.sum()) * speed.mean() / speed[rank])


class Texts(Dataset[Tensor]):
    """Samples of so many tokens."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((int(self.tokens[index]),), index % 64)


def packed(samples: list[Tensor]) -> Batch:
    """Return all tokens in one row, and how many each sample has."""
    return torch.cat(samples), torch.tensor([len(one) for one in samples])


class Device(nn.Module):
    """A small model in the time of an emulated device.

    Args:
        cell: says the times.
        rank: whose it is.

    Attributes:
        took_s: the device's time so far.
        forward_end_s, backward_end_s: when the newest ones ended, by this rank's clock.
    """

    def __init__(self, cell: Cell, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, 16)
        self.layer = nn.Linear(16, 1)
        self.cell, self.rank = cell, rank
        self.took_s = self.forward_end_s = self.backward_end_s = self._left_s = 0.0

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Return a number for each sample."""
        begin_s = perf_counter()
        seconds = self.cell.seconds(self.rank, lengths.numpy())
        beside_s = self.cell.delay_s * (self.rank == 0)
        self.took_s += seconds + beside_s
        self._left_s = (1 - _FORWARD) * seconds
        rows = self.embedding(tokens).split(lengths.tolist())
        found = self.layer(torch.stack([row.mean(dim=0) for row in rows]))
        sleep(max(0.0, begin_s + _FORWARD * seconds + beside_s - perf_counter()))
        self.forward_end_s = perf_counter()
        out: Tensor = Due.apply(found, self.backward)  # type: ignore[no-untyped-call]
        return out

    def backward(self) -> None:
        """Take the time of the backward."""
        sleep(self._left_s)
        self.backward_end_s = perf_counter()


@dataclass(frozen=True)
class Trained:
    """What one rank tells of a run.

    Attributes:
        spent_us: of each step by phase, ``(num_steps, len(Phase))``.
        size: tokens of its batches, ``(num_steps,)``.
        num_samples: likewise.
        sleep_over_cpu: the device's time over the CPU time of the process.
    """

    spent_us: np.ndarray
    size: np.ndarray
    num_samples: np.ndarray
    sleep_over_cpu: float


def train(rank: int, cell: Cell, methods: tuple[str, ...], num_steps: int) -> list[Trained]:
    """Return what methods took one after the other, all on the same samples in the same steps."""
    return [_trained(rank, cell, method, num_steps) for method in methods]


def _trained(rank: int, cell: Cell, method: str, num_steps: int) -> Trained:
    data = Texts(cell.tokens(num_steps * BATCH * NUM_RANKS))
    device = Device(cell, rank)
    model: Any = DistributedDataParallel(device)
    sampler: Any = DistributedSampler(data, shuffle=False)
    loader: Any = DataLoader(data, batch_size=BATCH, sampler=sampler, collate_fn=packed)
    if method == "plain":
        return _loop(model, device, loader)
    cost = data.tokens.tolist() if method == "by both" else None
    with Balancer(cost=cost, runtime=Runtime(line_every=None)) as balancer:
        model, loader = balancer.prepare(model, loader)
        return _loop(model, device, loader)


def _loop(model: nn.Module, device: Device, loader: Iterable[Batch]) -> Trained:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps, size, num_samples = [], [], []
    cpu_s, ended_s = process_time(), perf_counter()
    for tokens, lengths in loader:
        fetched_s = perf_counter()
        model(tokens, lengths).square().mean().backward()
        reduced_s = perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        end_s = perf_counter()
        spent = np.zeros(len(Phase))
        spent[Phase.INPUT] = fetched_s - ended_s
        spent[Phase.FORWARD] = device.forward_end_s - fetched_s
        spent[Phase.BACKWARD] = device.backward_end_s - device.forward_end_s
        spent[Phase.REDUCTION] = reduced_s - device.backward_end_s
        spent[Phase.OPTIMIZER] = end_s - reduced_s
        ended_s = end_s
        steps.append(1e6 * spent)
        size.append(int(lengths.sum()))
        num_samples.append(len(lengths))
    over_cpu = device.took_s / max(process_time() - cpu_s, 1e-9)
    return Trained(np.array(steps), np.array(size), np.array(num_samples), over_cpu)
