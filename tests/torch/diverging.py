"""What the workers of the divergence tests run: one rank goes another way than the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .loops import opened

ODD = 1  # the rank that goes another way


def train(ddp: nn.Module, x: torch.Tensor) -> None:
    ddp.zero_grad()
    (ddp(x) ** 2).mean().backward()


def skips_a_batch(ddp: nn.Module, loader: Any, *, is_odd: bool) -> None:
    """As for a batch that looks bad on one rank."""
    for number, (x, _) in enumerate(loader):
        if not (is_odd and number == 1):
            train(ddp, x)


def skips_the_first(ddp: nn.Module, loader: Any, *, is_odd: bool) -> None:
    """Before anything is known of the loop."""
    for number, (x, _) in enumerate(loader):
        if not (is_odd and number == 0):
            train(ddp, x)


def trains_twice(ddp: nn.Module, loader: Any, *, is_odd: bool) -> None:
    """As for a batch that is tried again."""
    for number, (x, _) in enumerate(loader):
        train(ddp, x)
        if is_odd and number == 1:
            train(ddp, x)


def uses_another(ddp: nn.Module, loader: Any, *, is_odd: bool) -> None:
    """Keeps an old batch where the others take the new one."""
    kept: list[torch.Tensor] = []
    for number, (x, _) in enumerate(loader):
        kept.append(x)
        train(ddp, kept[0] if is_odd and number == 1 else x)


def skips_half(ddp: nn.Module, loader: Any, *, is_odd: bool) -> None:
    """Trains on a part of its batch."""
    for number, (x, _) in enumerate(loader):
        train(ddp, x[::2] if is_odd and number == 1 else x)


WAYS = {
    way.__name__: way
    for way in (skips_a_batch, skips_the_first, trains_twice, uses_another, skips_half)
}


def error_of(rank: int, name: str) -> tuple[str, str]:
    """Return the class and the text of what a way ends in."""
    balancer, ddp, loader = opened()
    assert isinstance(ddp, DistributedDataParallel)
    try:
        with balancer:
            WAYS[name](ddp, loader, is_odd=rank == ODD)
    except Exception as error:
        return type(error).__name__, str(error)
    return "no error", ""
