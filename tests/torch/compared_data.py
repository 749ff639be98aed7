"""Ranks with other data than each other, and the error's text for each."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
)

from .compared_parts import (
    Batches,
    ByRank,
    Case,
    Endless,
    Made,
    Numbers,
    Parts,
    Seeded,
    Shifted,
    Split,
    balancer,
    data,
    fails_on,
    linear,
    model,
    only,
    row,
    rows,
    settings,
    stack,
    stock,
    subset,
)

OF_DATA: dict[str, tuple[Case, str]] = {
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
        "`DataLoader(dataset=...)` must give sample 0 on every rank, got FileNotFoundError: 0.png "
        "on rank 1. Without it that step ends on all. Where rank 1 was:\nTraceback (most recent",
    ),
    "rows in another order, with workers": (
        lambda rank: data(rank, Made(Shifted(rank)), num_workers=1),
        "Sample 0 of `DataLoader(dataset=...)` must be the same on all ranks, got (float32[4] ",
    ),
    "several at once": (
        lambda rank: balancer(loss_reduction=("mean", "sum")[rank]).prepare(
            linear(), stock(batch_size=4 + rank, drop_last=rank == 1)
        ),
        "rank 1. Set it alike.\n`DataLoader(batch_size=...)` must be the same",
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
        "What `DataLoader(sampler=...)` yields from equal random states must be the same on all",
    ),
    "a sampler that shards silently": (
        lambda rank: data(rank, sampler=Parts(24, rank, 2, shows=False)),
        "on rank 1. evenstep draws the order on rank 0 for all ranks, and splits it. Give a "
        "sampler that covers all samples, made alike on every rank",
    ),
    "an endless sampler that shards silently": (
        lambda rank: data(rank, sampler=Endless(rank)),
        "yields from equal random states must be the same on all ranks, got [0, 2, 4, 6, ...] on "
        "rank 0 and [1, 3, 5, 7, ...] on rank 1.",
    ),
    "draws by rank": (
        lambda rank: data(rank, sampler=ByRank()),
        "What `DataLoader(sampler=...)` yields from equal random states must be the same on all",
    ),
    "draws by a seed of the rank's own": (
        lambda rank: data(rank, sampler=Seeded(rank)),
        "without sharding or a seed by rank, so with `num_replicas=1, rank=0` where it takes",
    ),
    "random parts by rank": (
        lambda rank: data(rank, sampler=SubsetRandomSampler(range(rank, 24, 2))),
        "What `DataLoader(sampler=...)` yields from equal random states must be the same on all",
    ),
    "random parts that overlap": (
        lambda rank: data(
            rank,
            sampler=SubsetRandomSampler(
                torch.randperm(24, generator=torch.Generator().manual_seed(rank))[:16].tolist()
            ),
        ),
        "What `DataLoader(sampler=...)` yields from equal random states must be the same on all",
    ),
    "a batch sampler that shards": (
        lambda rank: balancer(4).prepare(
            linear(), DataLoader(rows(), batch_sampler=Batches(4, rank, 2))
        ),
        "What `DataLoader(batch_sampler=...)` yields from equal random states must be the same on "
        "all ranks, got [0, 1, 2, 3, ...] on rank 0 and [4, 5, 6, 7, ...] on rank 1.",
    ),
    "the sampler of an evaluation": (
        lambda rank: balancer().prepare_eval(stock(sampler=Parts(24, rank, 2, shows=False))),
        "What `DataLoader(sampler=...)` yields from equal random states must be the same on all",
    ),
    "a stream split by node": (
        lambda rank: balancer().prepare(linear(), stock(Split(rank)), stream="same"),
        "got 'same' with a Split that gives each of 2 ranks its own. Give the whole stream to",
    ),
}


OF_THREE: dict[str, tuple[Case, str]] = {
    "one of three": (
        lambda rank: settings(loss_reduction="sum" if rank == 1 else "mean"),
        "`Balancer(loss_reduction=...)` must be the same on all ranks, got 'mean' on ranks 0, 2 "
        "and 'sum' on rank 1. Set it alike.",
    ),
    "three of three": (
        lambda rank: data(rank, batch_size=4 + rank),
        "got 4 on rank 0, 5 on rank 1 and 6 on rank 2. It is a rank's part of an equal split; "
        "evenstep itself gives faster ranks more.",
    ),
    "a parameter": (
        lambda rank: model(linear(bias=rank != 2)),
        "The parameter `bias` of the model must be the same on all ranks, got float32 (2,) on "
        "ranks 0, 1 and none on rank 2.",
    ),
    "a sample": (
        lambda rank: data(rank, Made(Shifted(5 * (rank == 2)))),
        "Sample 0 of `DataLoader(dataset=...)` must be the same on all ranks, got (float32[4] ",
    ),
    "a subset for each rank": (
        lambda rank: data(rank, subset(rank, 3)),
        "`Subset(indices=...)` must be the same on all ranks, got [0, 3, 6, ...] (8, checksum ",
    ),
    "a sampler that shards silently": (
        lambda rank: data(rank, sampler=Parts(24, rank, 3, shows=False)),
        "What `DataLoader(sampler=...)` yields from equal random states must be the same on all",
    ),
}
