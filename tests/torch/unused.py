"""Scripts that use what ``prepare`` returned, or not; run as processes of their own."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from evenstep.torch import Balancer, Runtime


def parts(*, plain: bool = False) -> tuple[nn.Module, DataLoader]:
    model = nn.Linear(3, 1)
    data = DataLoader(TensorDataset(torch.ones(24, 3)), 4)
    return model if plain else DistributedDataParallel(model), data


def train(model: nn.Module, loader: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for (x,) in loader:
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def ignored(balancer: Balancer, *, plain: bool = False) -> None:
    model, loader = parts(plain=plain)
    balancer.prepare(model, loader)
    train(model, loader)


def ignored_and_plain(balancer: Balancer) -> None:
    ignored(balancer, plain=True)


def no_loader(balancer: Balancer) -> None:
    model, loader = parts()
    train(balancer.prepare(model), loader)


def used(balancer: Balancer) -> None:
    train(*balancer.prepare(*parts()))


def warmed_up_first(balancer: Balancer) -> None:
    model, loader = parts()
    prepared = balancer.prepare(model, loader)
    train(model, loader)
    train(*prepared)


def only_prepared(balancer: Balancer) -> None:
    balancer.prepare(*parts())


def evaluated(balancer: Balancer) -> None:
    model, _ = balancer.prepare(*parts())
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    for (x,) in balancer.prepare_eval(parts()[1]):
        with torch.no_grad():
            model(x)


def failed(balancer: Balancer) -> None:
    ignored(balancer)
    raise KeyError("of the script's own")


WARNED = (ignored, ignored_and_plain, no_loader)
SILENT = (used, warmed_up_first, only_prepared, evaluated, failed)


def warned(rank: int) -> dict[str, list[str]]:
    """Return the warnings about each script."""
    return {script.__name__: warnings_of(script) for script in (*WARNED, *SILENT)}


def warnings_of(script: Callable[[Balancer], None]) -> list[str]:
    """Return the warnings of evenstep's at the end of a ``with`` block."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with Balancer(runtime=Runtime(line_every=None)) as balancer:
                script(balancer)
        except KeyError:
            pass
    return [str(entry.message) for entry in caught if "prepare" in str(entry.message)]


if __name__ == "__main__":
    name, store, number = sys.argv[1:]
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=int(number), world_size=2)
    globals()[name](Balancer(runtime=Runtime(line_every=None)))
