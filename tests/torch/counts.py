"""What the workers of the tests of counts run."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from evenstep.policies import Fixed
from evenstep.torch import Balancer, Bounds, Runtime

from .loops import text_of
from .matrix import flat, wrapped
from .plans import Restless

QUIET = Runtime(line_every=None)
GRANULE = 4
BY_FOUR = Bounds(vary="count", granularity=GRANULE)


class Linear(nn.Module):
    """Two layers, as a sharded model needs them, and a buffer, which DDP broadcasts."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.first, self.last = nn.Linear(4, 8).double(), nn.Linear(8, 2).double()
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(self.scale * x)))


class Counted(TensorDataset):
    """Rows that count how often each was fetched, in loader workers too."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__(*tensors)
        self.fetched = torch.zeros(len(self), dtype=torch.int64).share_memory_()

    def __getitem__(self, index: int) -> Any:
        self.fetched[index] += 1
        return super().__getitem__(index)


def stock(num_samples: int, batch_size: int = 16, **options: Any) -> DataLoader:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(num_samples, 4, generator=generator, dtype=torch.float64)
    return DataLoader(Counted(x, torch.arange(num_samples)), batch_size, **options)


def run(wrap: str, num_samples: int, policy: Any, **options: Any) -> dict[str, Any]:
    """Return the rows of every forward, the samples seen, the errors, of an epoch on this rank."""
    gc.collect()  # or a forked loader worker frees the last case's DDP, which has threads
    rows, seen, errors, plans = [], [], [], set()
    x = stock(num_samples).dataset.tensors[0]
    with Balancer(policy=policy, bounds=BY_FOUR, runtime=QUIET) as balancer:
        model, loader = balancer.prepare(wrapped(Linear(), wrap), stock(num_samples, **options))
        for number, step in enumerate(loader.steps()):
            rows.append([])
            for mine, numbers in step:
                rows[-1].append(len(mine))
                if step.num_samples:
                    seen += numbers.tolist()
                (model(mine) ** 2).mean().backward()
            alone = Linear()
            (alone(x[48 * number : 48 * number + 48]) ** 2).mean().backward()
            errors.append(float((flat(model) - flat(alone)).norm() / flat(alone).norm()))
            model.zero_grad()
            plans.add(balancer.batch_sizes)
    return {"rows": rows, "seen": seen, "error": max(errors), "plans": plans}


def epochs(rank: int) -> dict[str, Any]:
    """Return what came of epochs with short last steps, for DDP and FSDP2, with workers too."""
    return {
        "restless": run("ddp", 48 * 4 + 13, Restless()),
        "restless fsdp2": run("fsdp2", 48 * 4 + 13, Restless()),
        "with workers": run("ddp", 48 * 4 + 13, Restless(), num_workers=1),
        "tiny tail": run("ddp", 48 + 2, Fixed((32, 12, 4))),
        "tiny tail fsdp2": run("fsdp2", 48 + 2, Fixed((32, 8, 8))),
    }


def opened(bounds: Bounds, *, plain: bool = False, batch_size: int = 16, **options: Any) -> None:
    model = options.pop("model", Linear)()
    static = options.pop("static_graph", False)
    balancer = Balancer(bounds=bounds, runtime=QUIET)
    data = stock(99, batch_size, **options)
    ddp = DistributedDataParallel(model, static_graph=static)
    _, loader = balancer.prepare(ddp, data)
    next(iter(loader) if plain else loader.steps())


def plain_loop() -> None:
    opened(BY_FOUR, plain=True)


def unlike_multiple() -> None:
    opened(BY_FOUR, batch_size=15)


def norm_in_the_tail() -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opened(BY_FOUR, model=lambda: nn.Sequential(Linear(), nn.BatchNorm1d(2)).double())


def static_graph() -> None:
    opened(BY_FOUR, static_graph=True)


MISTAKES = {
    "static graph": (static_graph, "Leave `static_graph` out, or use `for batch in loader`."),
    "plain loop": (
        plain_loop,
        "be used in a loop over `loader.steps()`, got `for batch in loader`",
    ),
    "unlike multiple": (
        unlike_multiple,
        "divide the global batch of 30 with `vary='count'`, got 4",
    ),
    "norm in the tail": (norm_in_the_tail, "have 4 samples for each of 2 ranks in its last step"),
}


def mistakes(rank: int) -> dict[str, str]:
    return {name: text_of(mistake) for name, (mistake, _) in MISTAKES.items()}
