"""Backwards of stock DDP, of DDP with the hook and no shares, and with equal shares, in turns."""

from __future__ import annotations

from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks._network_arena import gathered
from evenstep.network import Split
from evenstep.network._torch._hook import shard_gradients
from evenstep.network._torch._reducer import ShardedReducer
from evenstep.network._torch._transport import GlooTransport


class Weights(nn.Module):
    """Parameters whose gradients cost almost nothing to compute, in layers of 1 MB."""

    def __init__(self, num_elements: int) -> None:
        super().__init__()
        sizes = [2**18] * (num_elements // 2**18) or [num_elements]
        self.layers = nn.ParameterList(torch.zeros(size) for size in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a sum that every parameter is part of."""
        return torch.stack([(layer * x).sum() for layer in self.layers]).sum()


def backwards(settings: dict[str, Any]) -> dict[str, Any]:
    """Return seconds of every backward: from a barrier until the last rank has all gradients."""
    size, rank = dist.get_world_size(), dist.get_rank()
    models = {
        name: DistributedDataParallel(Weights(settings["num_elements"]))
        for name in ("plain", "fallback", "equal", "plain again")
    }
    seconds: dict[str, list[float]] = {name: [] for name in models}
    apart = 0.0
    transports = [GlooTransport(dist.new_group()) for _ in range(2)]
    hooked, shared = (ShardedReducer(each, timeout_s=120.0) for each in transports)
    with hooked, shared:
        shard_gradients(models["fallback"], hooked)
        shard_gradients(models["equal"], shared)
        shared.adopt(Split((2**20 // size,) * size, 1, settings["chunk_bytes"]))
        names = list(models)
        for turn in range(-2, settings["rounds"]):  # DDP makes its buckets anew after the first
            for place in range(len(names)):
                name = names[(place + turn) % len(names)]
                loss = models[name](torch.tensor(float(rank + 1)))
                dist.barrier()
                begin_s = monotonic()
                loss.backward()
                told = gathered((begin_s, monotonic()))
                for layer in models[name].parameters():
                    assert layer.grad is not None
                    apart = max(apart, float((layer.grad - (size + 1) / 2).abs().max()))
                models[name].zero_grad()
                if told is not None and turn >= 0:
                    seconds[name].append(max(e for _, e in told) - max(b for b, _ in told))
        dist.barrier()
    return {"seconds": seconds, "apart": apart}
