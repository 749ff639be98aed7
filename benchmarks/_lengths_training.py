"""A small model that trains on real text, on devices whose times are emulated by sleeping.

A rank's forward and backward end no sooner than the true cost of its batch says, by the lengths
of its samples and by the rank's speed. Their own arithmetic takes a fraction of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from time import perf_counter, sleep, thread_time

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from benchmarks._real_text import functions, tokens_of
from benchmarks._sleepers import Due
from evenstep.sim._sample_workload import lower_bound_s

LONGEST, VOCABULARY, WIDTH = 768, 1024, 32
LINEAR = 512  # a sample costs `LINEAR * L + L**2`: most of a long one's cost is quadratic
UNIT_S = {False: 220e-9, True: 180e-9}  # of that, by whether forwards are padded
START_S = 0.004  # of a forward, on a rank of mean speed
SPEEDS = {"equal": (1, 1, 1, 1), "1:1:2:4": (1, 1, 2, 4)}
Sample = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Cell:
    """One kind of training: what the device's time is.

    Attributes:
        speeds: of the ranks, by name. Their sum does not matter: the mean is 1.
        padded: whether a forward costs as many times its longest sample as it has samples.
    """

    speeds: str
    padded: bool

    def __str__(self) -> str:
        return f"{'padded' if self.padded else 'additive'}, 4 ranks {self.speeds}"

    @property
    def slow(self) -> np.ndarray:
        """Of each rank, what its time is a multiple of, ``(num_ranks,)``."""
        speed = np.array(SPEEDS[self.speeds])
        return speed.mean() / speed

    def seconds(self, rank: int, lengths: np.ndarray) -> float:
        """Return the time of a rank's forward and backward."""
        cost = cost_of(lengths)
        total = len(cost) * cost.max() if self.padded else cost.sum()
        return float((START_S + UNIT_S[self.padded] * total) * self.slow[rank])

    def bound_s(self, cost: np.ndarray) -> float:
        """Return what no assignment of samples of this cost beats; of padded ones, no runs."""
        unit_s = UNIT_S[self.padded] * self.slow
        return lower_bound_s(cost, START_S * self.slow, unit_s, padded=self.padded)[0]


def cost_of(lengths: np.ndarray) -> np.ndarray:
    """Return what samples cost, in units."""
    return LINEAR * lengths + lengths**2


class Text(Dataset[Sample]):
    """The functions of the standard library, and whether each returns something."""

    def __init__(self) -> None:  # the class says it
        texts = functions()
        self.tokens = [torch.tensor(tokens_of(one, LONGEST, VOCABULARY)) for one in texts]
        self.returns = torch.tensor([float("return" in one) for one in texts])
        self.lengths = np.array([len(one) for one in self.tokens])
        self.cost = cost_of(self.lengths)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Sample:
        return self.tokens[index], self.returns[index]


@cache
def text() -> Text:
    """Return the data set, read once in a process."""
    return Text()


def packed(samples: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor]:
    """Return all tokens in one row, the lengths, and what each sample is to be told as."""
    tokens, returns = zip(*samples, strict=True)
    return torch.cat(tokens), torch.tensor([len(one) for one in tokens]), torch.stack(returns)


def padded(samples: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same with tokens of samples in rows, filled up with zeros."""
    tokens, returns = zip(*samples, strict=True)
    rows = nn.utils.rnn.pad_sequence(list(tokens), batch_first=True)
    return rows, torch.tensor([len(one) for one in tokens]), torch.stack(returns)


class Device:
    """Makes a rank's forward and backward as long as their true cost.

    Args:
        cell: says the cost.
        rank: whose device it is.

    Attributes:
        took_s: the emulated time of each batch so far.
        cpu_s: CPU time of the thread in all of them.
    """

    def __init__(self, cell: Cell, rank: int) -> None:
        self.cell, self.rank = cell, rank
        self.took_s: list[float] = []
        self.cpu_s = 0.0

    def begin(self, lengths: np.ndarray) -> None:
        """Begin the forward of a batch."""
        self._began_s, self._began_cpu_s = perf_counter(), thread_time()
        self._takes_s = self.cell.seconds(self.rank, lengths)

    def forward_done(self) -> None:
        """Wait until a third of the time is over."""
        self._wait(self._takes_s / 3)

    def backward_done(self) -> None:
        """Wait until all of it is."""
        self.cpu_s += thread_time() - self._began_cpu_s
        self.took_s.append(self._takes_s)
        self._wait(self._takes_s)

    def _wait(self, taken_s: float) -> None:
        sleep(max(0.0, self._began_s + taken_s - perf_counter()))


class Reader(nn.Module):
    """Means over the tokens of a sample, of what a layer makes of each."""

    def __init__(self, device: Device) -> None:  # the class says it
        super().__init__()
        torch.manual_seed(0)
        self.device = device
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layer, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Return a number for each sample, ``(num_samples,)``."""
        self.device.begin(lengths.numpy())
        x = Due.apply(self.embedding(tokens), self.device.backward_done)
        x = torch.tanh(self.layer(x))
        if tokens.ndim == 1:
            owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
            total = x.new_zeros(len(lengths), WIDTH).index_add(0, owner, x)
        else:
            mask = torch.arange(tokens.shape[1]) < lengths[:, None]
            total = (x * mask[..., None]).sum(dim=1)
        found: Tensor = self.out(total / lengths[:, None])[:, 0]
        self.device.forward_done()
        return found


def contention(cell: Cell, rank: int, num_batches: int) -> float:
    """Return how long a rank's batches take beside the others, over how long alone; the median."""
    model, data = Reader(Device(cell, rank)), text()
    collate = padded if cell.padded else packed
    places = np.random.default_rng(rank).permutation(len(data))[: 8 * num_batches].reshape(-1, 8)
    batches = [collate([data[int(place)] for place in some]) for some in places]

    def run() -> np.ndarray:
        seconds = []
        for tokens, lengths, returns in batches:
            began_s = perf_counter()
            loss_of(model(tokens, lengths), returns).backward()
            seconds.append(perf_counter() - began_s)
        return np.array(seconds)

    run()
    for turn in range(dist.get_world_size()):
        dist.barrier()
        if turn == rank:
            alone = run()
    dist.barrier()
    return float(np.median(run() / alone))


def loss_of(found: Tensor, returns: Tensor) -> Tensor:
    """Return the mean over samples."""
    return nn.functional.binary_cross_entropy_with_logits(found, returns)
