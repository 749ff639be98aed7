"""What the workers run whose loaders, data or models change after ``prepare``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from evenstep.policies import Fixed
from evenstep.torch import Balancer

from .loops import text_of
from .matrix import QUIET


class Growing(list):
    """A data set that gets more samples."""


def prepared(batch_size: int = 4, **options: Any) -> tuple[Balancer, nn.Module, Any]:
    """Return a balancer, and the model and the loader that it prepared."""
    data = Growing(torch.arange(24.0).view(24, 1))
    balancer = Balancer(runtime=QUIET)
    return balancer, *balancer.prepare(nn.Linear(1, 1), DataLoader(data, batch_size, **options))


def trained(model: nn.Module, loader: Any) -> None:
    for x in loader:
        model(x).square().mean().backward()


def batch_size() -> None:
    _, _, loader = prepared()
    loader.batch_size = 6


def workers() -> None:
    _, _, loader = prepared()
    loader.num_workers = 2


def evaluation() -> None:
    data = TensorDataset(torch.zeros(24, 1))
    loader = Balancer(runtime=QUIET).prepare_eval(DataLoader(data, batch_size=4))
    loader.batch_size = 6


def inner_batch_size() -> None:
    _, model, loader = prepared()
    loader.batch_sampler.batch_size = 6
    trained(model, loader)


def inner_drop_last() -> None:
    _, model, loader = prepared()
    trained(model, loader)
    loader.batch_sampler.drop_last = True
    trained(model, loader)


def growing(**options: Any) -> None:
    _, model, loader = prepared(**options)
    trained(model, loader)
    loader.dataset.extend(torch.zeros(8, 1))
    trained(model, loader)


def second_balancer() -> None:
    _, model, loader = prepared()
    trained(model, loader)
    Balancer(runtime=QUIET).prepare(model, DataLoader(loader.dataset, batch_size=6))


def new_rollouts() -> None:
    balancer, model, loader = prepared()
    trained(model, loader)
    balancer.prepare(DataLoader(loader.dataset, batch_size=4))


CASES: dict[str, tuple[Callable[[], None], str]] = {
    "batch_size": (batch_size, "`DataLoader.batch_size` must stay as it was prepared, 4, for"),
    "num_workers": (workers, "`DataLoader.num_workers` must stay as it was prepared, 0, for"),
    "evaluation": (evaluation, "`DataLoader.batch_size` must stay as it was prepared, 4, for"),
    "batch_sampler.batch_size": (
        inner_batch_size,
        "`DataLoader.batch_sampler.batch_size` must stay as it was prepared, 4, for plans were",
    ),
    "batch_sampler.drop_last": (
        inner_drop_last,
        "`DataLoader.batch_sampler.drop_last` must stay as it was prepared, False, for plans were",
    ),
    "data that grow": (
        growing,
        "keep the samples of an epoch that it was prepared with, 24, got 32",
    ),
    "shuffled data that grow": (
        lambda: growing(shuffle=True),
        "keep the samples of an epoch that it was prepared with, 24, got 32",
    ),
    "second balancer": (second_balancer, "be given each model once"),
    "new rollouts": (new_rollouts, "make a Balancer for each iteration"),
}


def changed(rank: int) -> dict[str, str]:
    """Return the error's text of every change."""
    return {name: text_of(case) for name, (case, _) in CASES.items()}


def anew(rank: int) -> list[tuple[int, int, float]]:
    """Follow the remedy; return the batch size, the samples of an epoch and the worst error."""
    torch.manual_seed(0)
    found = []
    model: nn.Module = nn.Linear(1, 1).double()
    data = Growing(torch.arange(24.0).double().view(24, 1))
    learnt: dict[str, Any] = {}
    for size, sizes in ((4, (6, 2)), (6, (3, 9))):
        balancer = Balancer(policy=Fixed(sizes), runtime=QUIET)
        if learnt or rank:
            balancer.load_state_dict(learnt)
        model, loader = balancer.prepare(model, DataLoader(data, batch_size=size))
        seen, errors = 0, []
        for x in loader:
            model.zero_grad()
            model(x).square().mean().backward()
            alone = nn.Linear(1, 1).double()
            alone.load_state_dict(model.module.state_dict())
            alone(torch.stack(data[seen : seen + 2 * size])).square().mean().backward()
            errors.append(float((model.module.weight.grad - alone.weight.grad).abs().max()))
            seen += 2 * size
        learnt = balancer.state_dict()
        balancer.close()
        found.append((size, seen, max(errors)))
        data.extend(torch.arange(24.0).double().view(24, 1))
    return found
