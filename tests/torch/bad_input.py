"""What the workers of the bad-input tests run: each returns the error's text, on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from evenstep.torch import Balancer, Bounds, Runtime

QUIET = Runtime(line_every=None)


def stock(num_samples: int = 64, **options: Any) -> DataLoader:
    """Return a stock loader of pairs."""
    samples = TensorDataset(torch.randn(num_samples, 4), torch.randn(num_samples, 4))
    return DataLoader(samples, **{"batch_size": 8, **options})


def linear() -> DistributedDataParallel:
    """Return a small model in DDP."""
    return DistributedDataParallel(nn.Linear(4, 4))


def global_batch_below_the_world() -> None:
    Balancer(1, runtime=QUIET).prepare(linear(), stock(batch_size=1))


def global_batch_that_disagrees() -> None:
    Balancer(96, runtime=QUIET).prepare(linear(), stock())


def bounds_that_cannot_be_met() -> None:
    balancer = Balancer(bounds=Bounds(max=5), runtime=QUIET)
    _, loader = balancer.prepare(linear(), stock())
    next(iter(loader))


def smallest_sizes_past_the_batch() -> None:
    Balancer(bounds=Bounds(min=9), runtime=QUIET).prepare(linear(), stock())


def second_prepare() -> None:
    balancer = Balancer(runtime=QUIET)
    model = balancer.prepare(linear())
    balancer.prepare(model)


def second_prepare_by_another() -> None:
    model = Balancer(runtime=QUIET).prepare(linear())
    Balancer(runtime=QUIET).prepare(model)


def second_loader() -> None:
    Balancer(runtime=QUIET).prepare(linear(), stock(16), stock(19))


def loader_without_a_model() -> None:
    next(iter(Balancer(runtime=QUIET).prepare(stock())))


def something_else() -> None:
    Balancer(runtime=QUIET).prepare(linear(), [1, 2, 3])


def no_parameters() -> None:
    Balancer(runtime=QUIET).prepare(nn.ReLU())


def ddp_of_another_torch() -> None:
    model = linear()
    del model.require_forward_param_sync
    Balancer(runtime=QUIET).prepare(model)


def weight_given_twice() -> None:
    balancer = Balancer(runtime=QUIET)
    model, loader = balancer.prepare(linear(), stock())
    for x, _ in loader:
        balancer.weight(model(x).mean())


def term_weighted_twice() -> None:
    balancer = Balancer(runtime=QUIET)
    model, loader = balancer.prepare(linear(), stock(), weighting="loss")
    for x, _ in loader:
        term = balancer.weight(model(x).mean())
        balancer.weight(0.5 * (term + model(x).square().mean())).backward()


def weight_past_the_prepared_model() -> None:
    balancer = Balancer(runtime=QUIET)
    model, loader = balancer.prepare(linear(), stock(), weighting="loss")
    for x, _ in loader:
        balancer.weight(model.module(x).mean()).backward()


def output_without_a_gradient() -> None:
    class Blind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).detach()

    model, loader = Balancer(runtime=QUIET).prepare(DistributedDataParallel(Blind()), stock())
    for x, _ in loader:
        model(x)


def output_fed_back() -> None:
    model, loader = Balancer(runtime=QUIET).prepare(linear(), stock())
    between = nn.Linear(4, 4)
    for x, _ in loader:
        model(between(model(x)))


def two_kinds_of_loop() -> None:
    model, loader = Balancer(runtime=QUIET).prepare(linear(), stock(16))
    for x, _ in loader:
        model(x).mean().backward()
    next(loader.steps())


def two_weightings() -> None:
    balancer = Balancer(runtime=QUIET)
    balancer.prepare(linear(), weighting="loss")
    balancer.prepare(linear(), stock())


def mean_without_a_step() -> None:
    balancer = Balancer(runtime=QUIET)
    balancer.prepare(linear(), stock())
    balancer.mean(1.0)


def prepare_after_close() -> None:
    balancer = Balancer(runtime=QUIET)
    balancer.close()
    balancer.prepare(linear())


CASES: dict[str, tuple[Callable[[], None], str]] = {
    "global batch below the world": (
        global_batch_below_the_world,
        "`Balancer(global_batch_size=...)` must be at least the number of workers, 2, got 1.",
    ),
    "global batch that disagrees": (
        global_batch_that_disagrees,
        "must agree with `DataLoader(batch_size=8)` on 2 workers, which makes 16, got 96. Give",
    ),
    "bounds that cannot be met": (
        bounds_that_cannot_be_met,
        "`Bounds(max=...)` must add up to the global batch of 16 at least, in whole granules, got",
    ),
    "smallest sizes past the batch": (
        smallest_sizes_past_the_batch,
        "`Bounds(min=...)` must add up to the global batch of 16 at most, in whole granules, got",
    ),
    "second prepare": (second_prepare, "must be given each model once"),
    "second prepare by another": (second_prepare_by_another, "must be given each model once"),
    "second loader": (
        second_loader,
        "with 0 samples in a short last step, got 3. Set `DataLoader(drop_last=True)` on both",
    ),
    "loader without a model": (loader_without_a_model, "`prepare` the model too"),
    "something else": (something_else, "must be given torch modules and `DataLoader`s, got list"),
    "no parameters": (no_parameters, "must have parameters, got ReLU without any"),
    "DDP of another torch": (
        ddp_of_another_torch,
        "must keep a DDP's `require_forward_param_sync`, on which evenstep relies, got none there.",
    ),
    "weight given twice": (weight_given_twice, "must be used on models prepared with"),
    "term weighted twice": (term_weighted_twice, "be given a loss of which no term is weighted"),
    "weight past the prepared model": (
        weight_past_the_prepared_model,
        "got a step without one. Call the prepared model itself, `model(x)`, not `model.forward",
    ),
    "output without a gradient": (output_without_a_gradient, "return a tensor that needs a grad"),
    "output fed back": (output_fed_back, "without other parameters in between"),
    "two kinds of loop": (two_kinds_of_loop, "use one kind of loop"),
    "two weightings": (two_weightings, "must be 'loss', as in the call before, got 'output'."),
    "mean without a step": (mean_without_a_step, "give `balancer.mean(value, count=...)`"),
    "prepare after close": (prepare_after_close, "Make a new `Balancer`"),
}


def provoke(rank: int) -> dict[str, str]:
    """Return the error's text of every case."""
    texts = {}
    for name, (mistake, _) in CASES.items():
        try:
            mistake()
        except (ValueError, RuntimeError) as error:
            texts[name] = str(error)
    return texts


def batch_norm(rank: int) -> tuple[list[str], tuple[int, ...], list[str]]:
    """Return the warnings for a model with local BatchNorm, its sizes, those for one alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        balancer = Balancer(policy="tests.torch.plans:Greedy", runtime=QUIET)
        model, loader = balancer.prepare(model, stock())
        for x, y in loader:
            nn.functional.mse_loss(model(x), y).backward()
    sizes = balancer.batch_sizes
    balancer.close()
    with warnings.catch_warnings(record=True) as none:
        warnings.simplefilter("always")
        Balancer(runtime=QUIET).prepare(nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4)))
    return [str(warning.message) for warning in caught], sizes, [str(w.message) for w in none]
