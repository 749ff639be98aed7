"""Ranks with other settings or models than each other, and the error's text for each."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from evenstep.claims import Hybrid
from evenstep.policies import Fixed
from evenstep.torch import Bounds, Network, Runtime

from .compared_parts import (
    Case,
    balancer,
    count_all,
    count_rows,
    linear,
    lower,
    model,
    quietly_in_ddp,
    settings,
    stock,
)

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
        "`Balancer(unit=...)` must be the same on all ranks, got tests.torch.compared_parts.",
    ),
    "another function as unit": (
        lambda rank: settings(unit=(count_all, count_rows)[rank]),
        "count_all on rank 0 and tests.torch.compared_parts.count_rows on rank 1.",
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
    "sample_seed": (
        lambda rank: settings(runtime=Runtime(sample_seed=(1, 2)[rank])),
        "`Runtime(sample_seed=...)` must be the same on all ranks, got 1 on rank 0 and 2 on rank 1",
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
    "kind of wrapper": (
        lambda rank: model(fully_shard(linear()) if rank else linear()),
        "The model's wrapper must be the same on all ranks, got plain on rank 0 and FSDP2 on rank",
    ),
    "second of two models": (
        lambda rank: balancer().prepare(linear(), linear(bias=rank == 0), stock()),
        "The parameter `bias` of the model (model 2) must be the same on all ranks, got",
    ),
}
