"""What the workers of the tests of compared ranks run: one balancer for every case."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from evenstep.policies import Equal, Fixed
from evenstep.sync import Hybrid
from evenstep.torch import Balancer, Bounds, Network, Runtime

Case = Callable[[int], None]
"""What a rank does; the loader is never iterated, the balancer closed by whoever calls it."""

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


class Batches:
    """A batch sampler of global batches, perhaps one that shows a rank."""

    def __init__(self, size: int, rank: int | None = None) -> None:
        self.size = size
        if rank is not None:
            self.rank, self.num_replicas = rank, 2

    def __len__(self) -> int:
        return 24 // self.size

    def __iter__(self) -> Iterator[list[int]]:
        return (list(range(first, first + self.size)) for first in range(0, 24, self.size))


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


DIFFERENT: dict[str, tuple[Case, str]] = {
    # settings
    "loss_reduction": (
        lambda rank: settings(loss_reduction="sum" if rank == 1 else "mean"),
        "`Balancer(loss_reduction=...)` must be the same on all ranks, got 'mean' on rank 0 and "
        "'sum' on rank 1.",
    ),
    "global_batch_size": (
        lambda rank: settings(global_batch_size=(8, 7)[rank]),
        "`Balancer(global_batch_size=...)` must be the same on all ranks, got 8 on rank 0 and 7",
    ),
    "policy": (
        lambda rank: settings(policy=("auto", "equal")[rank]),
        "`Balancer(policy=...)` must be the same on all ranks, got Auto(",
    ),
    "settings of a policy": (
        lambda rank: settings(policy=Fixed(((4, 4), (5, 3))[rank])),
        "`Balancer(policy=...)` must be the same on all ranks, got Fixed(",
    ),
    "unit": (
        lambda rank: settings(unit=(count_all, "samples")[rank]),
        "`Balancer(unit=...)` must be the same on all ranks, got tests.torch.ranks_compared.",
    ),
    "another function as unit": (
        lambda rank: settings(unit=(count_all, count_rows)[rank]),
        "count_all on rank 0 and tests.torch.ranks_compared.count_rows on rank 1.",
    ),
    "code of a lambda as unit": (
        lambda rank: settings(unit=lower(rank)),
        "The code of `Balancer(unit=...)`, in Python",
    ),
    "bounds": (
        lambda rank: settings(bounds=Bounds(max=5 + rank)),
        "`Balancer(bounds=...)` must be the same on all ranks, got Bounds(min='auto', max=5, "
        "granularity=1, vary='size') on rank 0 and Bounds(min='auto', max=6,",
    ),
    "network": (
        lambda rank: settings(network=(Network(servers=()), Network(servers=(), margin=0.5))[rank]),
        "`Balancer(network=...)` must be the same on all ranks, got Network(",
    ),
    "freshness": (
        lambda rank: settings(runtime=Runtime(freshness=("newest", "exact")[rank])),
        "`Runtime(freshness=...)` must be the same on all ranks, got 'newest' on rank 0 and "
        "'exact' on rank 1.",
    ),
    "claims": (
        lambda rank: settings(runtime=Runtime(claims=("off", Hybrid())[rank])),
        "`Runtime(claims=...)` must be the same on all ranks, got 'off' on rank 0 and Hybrid(",
    ),
    "weighting": (
        lambda rank: balancer().prepare(linear(), stock(), weighting=("output", "loss")[rank]),
        "`Balancer.prepare(weighting=...)` must be the same on all ranks, got 'output' on rank 0",
    ),
    # what is prepared
    "order of what is prepared": (
        lambda rank: balancer().prepare(*(linear(), stock())[:: 1 - 2 * rank]),
        "The balancer's next call must be the same on all ranks, got `prepare(model, loader)` on "
        "rank 0 and `prepare(loader, model)` on rank 1.",
    ),
    "number of models": (
        lambda rank: balancer().prepare(*(linear(),) * (1 + rank), stock()),
        "got `prepare(model, loader)` on rank 0 and `prepare(model, model, loader)` on rank 1.",
    ),
    "evaluation on one rank": (
        lambda rank: (balancer().prepare if rank else balancer().prepare_eval)(stock()),
        "got `prepare_eval(loader)` on rank 0 and `prepare(loader)` on rank 1.",
    ),
    # models
    "class of the model": (
        lambda rank: model((linear(), nn.Bilinear(1, 4, 2))[rank]),
        "The model's class must be the same on all ranks, got torch.nn.modules.linear.Linear on",
    ),
    "shape of a parameter": (
        lambda rank: model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2 + rank))),
        "The parameter `1.weight` of the model must be the same on all ranks, got float32 (2, 4) "
        "on rank 0 and float32 (3, 4) on rank 1.",
    ),
    "name of a parameter": (
        lambda rank: model(nn.ModuleDict({("head", "tail")[rank]: nn.Linear(4, 2)})),
        "The parameter `head.weight` of the model must be the same on all ranks, got float32 "
        "(2, 4) on rank 0 and none on rank 1.",
    ),
    "a layer more": (
        lambda rank: model(nn.Sequential(*(nn.Linear(4, 4) for _ in range(2 + rank)))),
        "The parameter `2.weight` of the model must be the same on all ranks, got none on rank 0",
    ),
    "dtype of a parameter": (
        lambda rank: model(linear(dtype=(torch.float32, torch.float64)[rank])),
        "got float32 (2, 4) on rank 0 and float64 (2, 4) on rank 1.",
    ),
    "frozen parameter": (
        lambda rank: model(nn.Sequential(linear().requires_grad_(rank == 0), linear())),
        "got float32 (2, 4) on rank 0 and float32 (2, 4), frozen on rank 1.",
    ),
    "buffers": (
        lambda rank: model(
            nn.Sequential(linear(), nn.BatchNorm1d(2, affine=False, track_running_stats=rank == 0))
        ),
        "The buffer `1.running_mean` of the model must be the same on all ranks, got float32 (2,)",
    ),
    "dropout": (
        lambda rank: model(nn.Sequential(linear(), nn.Dropout(0.1 + 0.4 * rank))),
        "The layer `1` of the model must be the same on all ranks, got Dropout(p=0.1, "
        "inplace=False) on rank 0 and Dropout(p=0.5, inplace=False) on rank 1.",
    ),
    "find_unused_parameters": (
        lambda rank: model(DistributedDataParallel(linear(), find_unused_parameters=rank == 1)),
        "`DistributedDataParallel(find_unused_parameters=...)` must be the same on all ranks, got "
        "False on rank 0 and True on rank 1.",
    ),
    "static_graph": (
        lambda rank: model(DistributedDataParallel(linear(), static_graph=rank == 1)),
        "`DistributedDataParallel(static_graph=...)` must be the same",
    ),
    "broadcast_buffers": (
        lambda rank: model(quietly_in_ddp(broadcast_buffers=rank == 1)),
        "`DistributedDataParallel(broadcast_buffers=...)` must be the same",
    ),
    "second of two models": (
        lambda rank: balancer().prepare(linear(), linear(bias=rank == 0), stock()),
        "The parameter `bias` of the model (model 2) must be the same on all ranks, got",
    ),
    # loaders
    "batch_size": (
        lambda rank: data(rank, batch_size=4 + rank),
        "`DataLoader(batch_size=...)` must be the same on all ranks, got 4 on rank 0 and 5 on",
    ),
    "drop_last": (
        lambda rank: data(rank, drop_last=rank == 1),
        "`DataLoader(drop_last=...)` must be the same on all ranks, got False on rank 0 and True",
    ),
    "shuffle": (
        lambda rank: data(rank, shuffle=rank == 1),
        "`DataLoader(sampler=...)` must be the same on all ranks, got SequentialSampler "
        "(`shuffle=False`) on rank 0 and RandomSampler (`shuffle=True`) on rank 1.",
    ),
    "kind of sampler": (
        lambda rank: data(
            rank,
            sampler=(RandomSampler(range(24), num_samples=24), SubsetRandomSampler(range(24)))[
                rank
            ],
        ),
        "`DataLoader(sampler=...)` must be the same on all ranks, got RandomSampler (`shuffle=Tr",
    ),
    "replacement": (
        lambda rank: data(rank, sampler=RandomSampler(range(24), replacement=rank == 1)),
        "`RandomSampler(replacement=...)` must be the same on all ranks, got False on rank 0 and",
    ),
    "number of samples of a sampler": (
        lambda rank: data(rank, sampler=RandomSampler(range(24), num_samples=24 - 8 * rank)),
        "`len(sampler)` must be the same on all ranks, got that of the data set on rank 0 and 16",
    ),
    "shuffle of a DistributedSampler": (
        lambda rank: data(rank, sampler=DistributedSampler(range(24), shuffle=rank == 1)),
        "`DistributedSampler(shuffle=...)` must be the same on all ranks, got False on rank 0",
    ),
    "batch sampler": (
        lambda rank: balancer(8).prepare(
            linear(),
            DataLoader(
                rows(),
                batch_sampler=(Batches(8), BatchSampler(SequentialSampler(range(24)), 8, False))[
                    rank
                ],
            ),
        ),
        "`DataLoader(batch_sampler=...)` must be the same on all ranks, got tests.torch.",
    ),
    "collate_fn": (
        lambda rank: data(rank, **only(rank, 1, collate_fn=stack)),
        "`DataLoader(collate_fn=...)` must be the same on all ranks, got torch.utils.data.",
    ),
    "second of two loaders": (
        lambda rank: balancer().prepare(linear(), stock(), stock(drop_last=rank == 1)),
        "`DataLoader(drop_last=...)` (loader 2) must be the same on all ranks, got False on",
    ),
    "evaluation": (
        lambda rank: balancer().prepare_eval(stock(rows(24 - 4 * rank))),
        "`len(dataset)` must be the same on all ranks, got 24 on rank 0 and 20 on rank 1.",
    ),
    "kind of stream": (
        lambda rank: balancer().prepare(
            linear(), stock(Numbers()), stream=("same", "sharded")[rank]
        ),
        "`Balancer.prepare(stream=...)` must be the same on all ranks, got 'same' on rank 0 and",
    ),
    # data
    "length of the data set": (
        lambda rank: data(rank, rows(24 - 4 * rank)),
        "`len(dataset)` must be the same on all ranks, got 24 on rank 0 and 20 on rank 1. Give the "
        "whole data set",
    ),
    "type of the data set": (
        lambda rank: data(rank, (rows(), Made(lambda index: (row(index),)))[rank]),
        "`DataLoader(dataset=...)` must be the same on all ranks, got torch.utils.data",
    ),
    "rows in another order": (
        lambda rank: data(rank, Made(lambda index: row(23 - index if rank else index))),
        "Sample 0 of `DataLoader(dataset=...)` must be the same on all ranks, got (float32[4] ",
    ),
    "labels": (
        lambda rank: data(rank, Made(lambda index: (row(index), index + rank))),
        "Sample 0 of `DataLoader(dataset=...)` must be the same on all ranks, got (float32[4] ",
    ),
    "the last row alone": (
        lambda rank: data(rank, Made(lambda index: row(index + 7 * (index == 23 and rank)))),
        "Sample 23 of `DataLoader(dataset=...)` must be the same on all ranks",
    ),
    "dtype of samples under augmentation": (
        lambda rank: data(
            rank,
            Made(
                lambda index: torch.as_tensor(
                    np.random.default_rng().random(4), dtype=(torch.float32, torch.float64)[rank]
                )
            ),
        ),
        "got float32[1d] on rank 0 and float64[1d] on rank 1.",
    ),
    "shape of samples under augmentation": (
        lambda rank: data(rank, Made(lambda index: np.random.default_rng().random(4 + rank))),
        "got (4,) on rank 0 and (5,) on rank 1.",
    ),
    "keys of a sample": (
        lambda rank: data(rank, Made(lambda index: {("x", "y")[rank]: 1})),
        "got dict('x' int) on rank 0 and dict('y' int) on rank 1.",
    ),
    "a text": (
        lambda rank: data(rank, Made(lambda index: {"text": f"sample {index}" + " " * rank})),
        "got ('sample 0') on rank 0 and ('sample 0 ') on rank 1.",
    ),
    "files of one rank are missing": (
        lambda rank: data(rank, Made(fails_on(rank, 1))),
        "got float32[1d] on rank 0 and FileNotFoundError raised on rank 1.",
    ),
    "rows in another order, with workers": (
        lambda rank: data(rank, Made(Shifted(rank)), num_workers=1),
        "Sample 0 of `DataLoader(dataset=...)` must be the same on all ranks, got (float32[4] ",
    ),
    # data already sharded by rank
    "a subset for each rank": (
        lambda rank: data(rank, subset(rank)),
        "`Subset(indices=...)` must be the same on all ranks, got [0, 2, 4, ...] (12, checksum",
    ),
    "a subset for each rank, of unlike lengths": (
        lambda rank: data(rank, Subset(rows(), range(rank, 23, 2))),
        "`len(dataset)` must be the same on all ranks, got 12 on rank 0 and 11 on rank 1. Give the "
        "whole data set, in the same order, to every rank: evenstep splits every batch",
    ),
    "a sampler with rank and world size": (
        lambda rank: data(rank, sampler=Parts(24, rank, 2, shows=True)),
        "must yield samples of the whole data set, got a Parts that gives each of 2 ranks its own.",
    ),
    "a sampler that shards silently": (
        lambda rank: data(rank, sampler=Parts(24, rank, 2, shows=False)),
        "must yield samples of the whole data set, got a Parts whose indices no two ranks have in",
    ),
    "random parts by rank": (
        lambda rank: data(rank, sampler=SubsetRandomSampler(range(rank, 24, 2))),
        "got a SubsetRandomSampler whose indices no two ranks have in common. Give the whole data",
    ),
    "a batch sampler with rank": (
        lambda rank: balancer(8).prepare(
            linear(), DataLoader(rows(), batch_sampler=Batches(8, rank))
        ),
        "got a Batches that gives each of 2 ranks its own.",
    ),
    "a stream split by node": (
        lambda rank: balancer().prepare(linear(), stock(Split(rank)), stream="same"),
        "got a Split that gives each of 2 ranks its own.",
    ),
}


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


ALIKE: dict[str, Case] = {
    "seeds, and augmentation that they control": seeded,
    "augmentation that nothing controls": lambda rank: data(rank, Made(flipped)),
    "random lengths": lambda rank: data(rank, Made(cropped)),
    "the last bits of unlike hardware": lambda rank: data(
        rank, Made(lambda index: of_rank(rank, index))
    ),
    "a bit of everything": lambda rank: data(rank, Made(mixed)),
    "a data set that fails everywhere": lambda rank: data(rank, Made(fails_on(1, 1))),
    "streams": lambda rank: balancer().prepare(
        linear(), stock(Numbers(100 * rank, 30 + rank)), stream="sharded"
    ),
    "streams that all read": lambda rank: balancer().prepare(
        linear(), stock(Numbers()), stream="same"
    ),
    "how samples are fetched": lambda rank: loads(
        rank, **only(rank, 1, num_workers=1, prefetch_factor=3, persistent_workers=True, timeout=9)
    ),
    "weighted samplers": lambda rank: data(
        rank,
        sampler=WeightedRandomSampler(
            [1.0] * 24, 12, generator=torch.Generator().manual_seed(rank)
        ),
    ),
    "random parts that overlap": lambda rank: data(
        rank,
        sampler=SubsetRandomSampler(
            torch.randperm(24, generator=torch.Generator().manual_seed(rank))[:16].tolist()
        ),
    ),
    "a part drawn anew each epoch": lambda rank: data(
        rank, rows(48), sampler=Whole(48, 0, 2, shows=False)
    ),
    "collate functions without a name": lambda rank: data(
        rank, collate_fn=lambda rows: rows[rank:]
    ),
    "a batch for each rank, as even as can be": lambda rank: balancer(9).prepare(
        linear(), stock(batch_size=5 - rank)
    ),
    "a distributed sampler": lambda rank: data(
        rank, sampler=DistributedSampler(range(24), seed=rank)
    ),
    "devices and how a run is watched": lambda rank: settings(
        runtime=Runtime(line_every=1 + rank, deadline_s=30.0 + rank, hooks=(print,) * rank)
    ),
    "how much is evaluated at once": lambda rank: balancer().prepare_eval(
        stock(batch_size=4 + rank)
    ),
    "settings said in two ways": lambda rank: settings(policy=("equal", Equal())[rank]),
    "a unit without a name": lambda rank: settings(unit=lambda batch: batch[0].numel() + rank * 0),
}


def provoke(rank: int, names: list[str]) -> dict[str, str]:
    """Return what each case of differing ranks raises: type and text."""
    texts = {}
    for name in names:
        try:
            DIFFERENT[name][0](rank)
        except Exception as error:
            texts[name] = f"{type(error).__name__}: {error}"
        close()
    return texts


def accept(rank: int) -> tuple[dict[str, str], list[str]]:
    """Return what cases that are alike raise, and their warnings."""
    texts = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name, case in ALIKE.items():
            before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
            try:
                case(rank)
            except Exception as error:
                texts[name] = f"{type(error).__name__}: {error}"
            close()
            after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
            if name == "a bit of everything" and not all(
                map(lambda one, two: bool(np.all(one == two)), before[1:], after[1:])
            ):
                texts[name] = "random states have changed"
    return texts, [str(warning.message) for warning in caught]


def close() -> None:
    """End what a case has begun."""
    while _OPEN:
        _OPEN.pop().close()
