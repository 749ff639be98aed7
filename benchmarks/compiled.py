"""What sizes that change cost a compiled model, and what it gains.

Two ranks train an uncompiled and a compiled model side by side on the same batches, under plans
that change every ten steps. Counted: graphs that Inductor makes for training, and the last step in
which anything was compiled. An uncompiled run of a compiled model would be an error, not a slow
step: torch is told to raise where it would give up. The time is that of forward and backward, as a
ratio of medians over pairs of steps that take turns.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, final

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._common import Row, main, progress
from evenstep import Cluster, Decision, StepTimings, apportion
from evenstep.exceptions import EvenstepWarning
from evenstep.policies import AbstractPolicy
from evenstep.testing import run_workers
from evenstep.torch import Balancer, Bounds, Runtime

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

BATCH_SIZE = 24
CHANGE_EVERY = 10
WARM_UP = 3 * CHANGE_EVERY  # three plans


@final
@dataclass(frozen=True, slots=True)
class Wandering(AbstractPolicy[int]):
    """New random sizes after every so many steps, whatever was measured."""

    every: int = CHANGE_EVERY
    name = "wandering"

    def init(self, cluster: Cluster) -> Decision[int]:
        return self._draw(cluster, 0)

    def update(self, cluster: Cluster, timings: StepTimings, state: int) -> Decision[int]:
        return self._draw(cluster, state + 1)

    def _draw(self, cluster: Cluster, count: int) -> Decision[int]:
        rng = np.random.default_rng(count // self.every)
        shares = rng.uniform(0.05, 1.0, cluster.world_size)
        return Decision(apportion(shares, cluster), count, reason="drawn")


class _Cnn(nn.Module):
    """Four convolutions on 24 x 24 pixels, each normalised.

    Args:
        norm: makes a normalisation for so many channels.
    """

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after, stride in ((3, 24, 1), (24, 32, 2), (32, 48, 2), (48, 64, 1)):
            conv = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
            layers += [conv, norm(after), nn.GELU()]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).mean((2, 3)))  # type: ignore[no-any-return]


class _Transformer(nn.Module):
    """Two blocks of width 64 on 32 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(100, 64)
        self.blocks = nn.ModuleList(_Block(64, 4) for _ in range(2))
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean(1))  # type: ignore[no-any-return]


class _Block(nn.Module):
    """Causal attention and a feed-forward layer, both after a normalisation.

    Args:
        width: of the hidden states.
        num_heads: of the attention.
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(2, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "CNN with GroupNorm": lambda: _Cnn(lambda width: nn.GroupNorm(4, width)),
    "CNN with BatchNorm": lambda: _Cnn(nn.BatchNorm2d),
    "transformer": _Transformer,
}


def samples(name: str, num_samples: int) -> TensorDataset:
    """Return inputs of the model's kind and classes."""
    x = (
        torch.randint(100, (num_samples, 32))
        if name == "transformer"
        else torch.randn(num_samples, 3, 24, 24)
    )
    return TensorDataset(x, torch.randint(10, (num_samples,)))


def loss_of(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Return the loss of a batch."""
    return functional.cross_entropy(model(batch[0]), batch[1])


def train(rank: int, name: str, num_steps: int, by_count: bool) -> dict[str, Any]:
    """Train both models; return what was compiled when, and the seconds of every step."""
    import torch._dynamo.testing

    backend = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    stalls: list[int] = []
    warnings.simplefilter("ignore", EvenstepWarning)  # of BatchNorm, which is meant here
    torch.manual_seed(0)
    step, regions, sizes = -1, 0, set()
    torch._dynamo.callback.on_compile_start(lambda _: stalls.append(step))
    total = BATCH_SIZE * dist.get_world_size()
    bounds = Bounds(vary="count", granularity=4) if by_count else Bounds()
    seconds: dict[str, list[float]] = {"eager": [], "compiled": []}
    with (
        torch._dynamo.config.patch(fail_on_recompile_limit_hit=True),
        Balancer(policy=Wandering(), bounds=bounds, runtime=Runtime(line_every=None)) as balancer,
    ):
        models = {
            "eager": DistributedDataParallel(MODELS[name]()),
            "compiled": DistributedDataParallel(torch.compile(MODELS[name](), backend=backend)),
        }

        stock = DataLoader(samples(name, total * num_steps), batch_size=BATCH_SIZE)
        models["eager"], models["compiled"], loader = balancer.prepare(*models.values(), stock)
        for step, parts in enumerate(loader.steps()):  # read by the callback
            sizes.add(balancer.batch_sizes[rank])
            spent = dict.fromkeys(models, 0.0)
            for batch in parts:
                for which in ("eager", "compiled") if step % 2 else ("compiled", "eager"):
                    began_s = perf_counter()
                    loss_of(models[which], batch).backward()
                    spent[which] += perf_counter() - began_s
                regions = regions or backend.frame_count
            for which, model in models.items():
                seconds[which].append(spent[which])
                model.zero_grad()
    found = {"regions": regions, "graphs": backend.frame_count, "sizes": sizes}
    return {**found, "last": max(stalls, default=-1), **timed(seconds)}


def timed(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return what the steps after the first plans took, and the longest of all."""
    times = np.array([seconds["eager"], seconds["compiled"]])
    late = times[:, WARM_UP:]
    return {"ratios": late[1] / late[0], "eager_s": median(late[0]), "stall_s": times[1].max()}


def row(name: str, num_steps: int, *, by_count: bool = False) -> Row:
    """Return what two ranks saw, the worse of them where they differ."""
    ranks = run_workers(2, train, name, num_steps, by_count, timeout_s=1500)
    graphs = max(found["graphs"] / found["regions"] for found in ranks)
    last = max(found["last"] for found in ranks)
    ratio = median(ratio for found in ranks for ratio in found["ratios"])
    sizes = set().union(*(found["sizes"] for found in ranks))
    allowed = 1 if by_count else 2
    how = ", fixed micro-batches" if by_count else ""
    return Row(
        what=f"{name}, {num_steps} steps{how}",
        bar=f"<= {allowed} graphs a region, none after step {WARM_UP}, faster than eager",
        measured={
            "graphs_per_region": graphs,
            "last_compiled_step": last,
            "local_batch_sizes": len(sizes),
            "smallest": min(sizes),
            "largest": max(sizes),
            "compiled_over_eager": ratio,
            "eager_ms": 1e3 * median(found["eager_s"] for found in ranks),
            "longest_stall_s": max(found["stall_s"] for found in ranks),
        },
        met=graphs <= allowed and last <= WARM_UP and ratio < 1,
    )


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Measure every model by size, and one by count."""
    num_steps = 60 if options.quick else 500
    for name in MODELS:
        progress(name)
        yield row(name, num_steps)
    progress("fixed micro-batches")
    yield row("transformer", num_steps, by_count=True)


if __name__ == "__main__":
    main(__doc__, rows)
