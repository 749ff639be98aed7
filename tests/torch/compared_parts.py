"""What the tests of compared ranks prepare: models, data sets, samplers, one balancer a case."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
)

from evenstep.torch import Balancer, Runtime

Case = Callable[[int], None]
"""What a rank does; the balancer is closed by whoever calls it."""

_OPEN: list[Balancer] = []


def balancer(*arguments: Any, runtime: Runtime | None = None, **settings: Any) -> Balancer:
    """Return a quiet balancer that is closed at the end of its case."""
    made = Balancer(*arguments, runtime=runtime or Runtime(line_every=None), **settings)
    _OPEN.append(made)
    return made


class Made(Dataset):
    """A data set whose sample ``i`` is ``make(i)``."""

    def __init__(self, make: Callable[[int], Any], num_samples: int = 24) -> None:
        self.make = make
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.num_samples:
            raise IndexError(index)
        return self.make(index)


class Numbers(IterableDataset):
    """A stream."""

    def __init__(self, first: int = 0, num: int = 24) -> None:
        self.numbers = range(first, first + num)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.full((4,), float(number)) for number in self.numbers)


def row(index: int) -> torch.Tensor:
    """Return the features of a sample."""
    return torch.randn(4, generator=torch.Generator().manual_seed(index))


def rows(num_samples: int = 24) -> TensorDataset:
    """Return the same rows on every rank."""
    return TensorDataset(torch.stack([row(index) for index in range(num_samples)]))


def stock(dataset: Any = None, **options: Any) -> DataLoader:
    """Return a loader of rows."""
    return DataLoader(rows() if dataset is None else dataset, **{"batch_size": 4, **options})


def linear(**options: Any) -> nn.Module:
    """Return a small model."""
    return nn.Linear(4, 2, **options)


def data(rank: int, dataset: Any = None, **options: Any) -> None:
    """Prepare a model and a loader."""
    balancer().prepare(linear(), stock(dataset, **options))


def model(module: nn.Module) -> None:
    """Prepare a model beside a loader."""
    balancer().prepare(module, stock())


def settings(**options: Any) -> None:
    """Prepare with settings of the balancer."""
    balancer(**options).prepare(linear(), stock())


class Parts(Sampler):
    """A sampler that shards, by rank and number of ranks or silently."""

    def __init__(self, num_samples: int, rank: int, world_size: int, *, shows: bool) -> None:
        self.mine = range(rank, num_samples, world_size)
        if shows:
            self.rank, self.world_size = rank, world_size

    def __len__(self) -> int:
        return len(self.mine)

    def __iter__(self) -> Iterator[int]:
        return iter([self.mine[place] for place in torch.randperm(len(self.mine)).tolist()])


class Whole(Parts):
    """A sampler of a subset drawn anew each epoch, of one length on all ranks and not sharded."""

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng().permutation(48)[: len(self.mine)].tolist())


class Endless(Sampler):
    """A sampler without end that knows its rank under a private name."""

    def __init__(self, rank: int) -> None:
        self._r, self._w = rank, 2

    def __iter__(self) -> Iterator[int]:
        return (number * self._w % 24 + self._r for number in count())


class ByRank(Sampler):
    """A sampler that asks for the rank when it draws, with replacement."""

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        drawn = torch.Generator().manual_seed(dist.get_rank())
        return iter(torch.randint(24, (12,), generator=drawn).tolist())


class Seeded(Sampler):
    """A sampler whose draws follow from a number."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng(self.seed).integers(0, 24, 12).tolist())


class Drawing(Sampler):
    """A sampler with generators of its own, which begin elsewhere on every rank."""

    def __init__(self, rank: int) -> None:
        self.generators = {"numpy": np.random.default_rng(rank), "python": random.Random(rank)}

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        order = self.generators["numpy"].permutation(24).tolist()
        self.generators["python"].shuffle(order)
        return iter(order)


class Once(Sampler):
    """A sampler that yields what an iterator has left."""

    def __init__(self, num_samples: int) -> None:
        self.left = (number for number in range(num_samples))

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        return self.left


def float_of(index: int) -> torch.Tensor:
    """Return a sample that is its own number."""
    return torch.tensor(float(index))


def once(rank: int) -> None:
    """Train on every sample of a sampler that yields them once."""
    model, loader = balancer().prepare(linear(), stock(Made(float_of), sampler=Once(24)))
    seen = torch.zeros(24)
    for numbers in loader:
        model(numbers[:, None].expand(-1, 4)).mean().backward()
        seen[numbers.long()] += 1
    dist.all_reduce(seen)
    assert seen.tolist() == [1.0] * 24


class Batches:
    """A batch sampler of global batches that may know its rank, or shard by it."""

    def __init__(self, size: int, rank: int = 0, num_replicas: int = 1) -> None:
        self.size = size
        self.rank = rank
        self.num_replicas = num_replicas

    def __len__(self) -> int:
        return 24 // self.size // self.num_replicas

    def __iter__(self) -> Iterator[list[int]]:
        batches = [list(range(first, first + self.size)) for first in range(0, 24, self.size)]
        return iter(batches[self.rank % self.num_replicas :: self.num_replicas])


def only(rank: int, when: int, **options: Any) -> dict[str, Any]:
    """Return the options on one rank alone."""
    return options if rank == when else {}


def quietly_in_ddp(**options: Any) -> nn.Module:
    """Return a model in DDP, without what newer versions of torch say of an option's name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedDataParallel(linear(), **options)


def count_all(batch: Any) -> float:
    """Count the units of a batch."""
    return float(batch[0].numel())


def count_rows(batch: Any) -> float:
    """Count them otherwise."""
    return float(len(batch[0]))


def stack(samples: list[Any]) -> torch.Tensor:
    """Collate rows."""
    return torch.stack([sample[0] for sample in samples])


def lower(rank: int) -> Any:
    """Return functions of one name and other code."""
    return (lambda batch: len(batch[0])) if rank else (lambda batch: batch[0].numel())


def fails_on(rank: int, when: int) -> Callable[[int], torch.Tensor]:
    """Return what makes a sample, and has no file on one rank."""

    def make(index: int) -> torch.Tensor:
        if rank == when:
            raise FileNotFoundError(f"{index}.png")
        return row(index)

    return make


def subset(rank: int, num_ranks: int = 2) -> Subset:
    """Return every second row, or third."""
    return Subset(rows(), range(rank, 24, num_ranks))


@dataclass
class Shifted:
    """Makes rows that begin elsewhere on every rank."""

    rank: int

    def __call__(self, index: int) -> torch.Tensor:
        return row(index + self.rank)


@dataclass
class Node:
    """What Hugging Face's streams know about their part."""

    rank: int
    world_size: int


class Split(Numbers):
    """A stream that ``split_dataset_by_node`` made."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self._distributed = Node(rank, 2)


class Picture:
    """What a picture of Pillow's looks like."""

    mode = "RGB"

    def __init__(self, index: int) -> None:
        self.size = (2, 2)
        self.content = bytes([index] * 12)

    def tobytes(self) -> bytes:
        return self.content


def flipped(index: int) -> torch.Tensor:
    """Return a row, backwards as often as not, by chance that no seed controls."""
    return row(index).flip(0) if random.SystemRandom().random() < 0.5 else row(index)


def cropped(index: int) -> torch.Tensor:
    """Return a part of a row, of a random length."""
    return row(index)[: random.SystemRandom().randint(1, 4)]


def of_rank(rank: int, index: int) -> torch.Tensor:
    """Return a row whose last bits differ between ranks, as on unlike hardware."""
    return row(index) * (1 + 3e-7 * rank)


def seeded(rank: int) -> None:
    """Prepare with all seeds differing."""
    torch.manual_seed(rank)
    np.random.seed(rank)
    random.seed(rank)
    made = Made(lambda index: row(index) + torch.randn(4) + np.random.rand() + random.random())
    data(rank, made, shuffle=True, generator=torch.Generator().manual_seed(rank))


def mixed(index: int) -> dict[str, Any]:
    """Return a sample with a bit of everything."""
    return {
        "input_ids": [index, 2, 3][: 1 + index % 3],
        "text": "some text",
        "none": None,
        "weights": [0.5, float("nan"), float("inf")],
        "array": np.full((2, 3), np.nan),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "complex": torch.ones(2, dtype=torch.complex64),
        "bytes": b"abc",
        "words": np.array(["a", "bc"]),
        "objects": np.array([None, "x"], dtype=object),
        "date": np.datetime64("2026-01-01"),
        "scalar": np.float32(1.5),
        "picture": Picture(index),
        "sparse": torch.eye(2).to_sparse(),
        "empty": torch.empty(0),
        "nothing": [],
        "set": {"b", "a", "c"},
        "frozen": np.lib.stride_tricks.as_strided(np.zeros(1), (4,), (0,), writeable=False),
    }


def loads(rank: int, **options: Any) -> None:
    """Prepare with what only says how samples are fetched, another on every rank."""
    data(rank, Made(Shifted(0)), **options)


def close() -> None:
    """End what a case has begun."""
    while _OPEN:
        _OPEN.pop().close()
