"""Models whose forward makes terms that are not in its output."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import weight_norm

from evenstep.exceptions import EvenstepWarning
from evenstep.policies import Fixed
from evenstep.torch import Balancer, Runtime

from .loops import BATCH_SIZE, stock

WORDS = "beside the model's output"


class Experts(nn.Module):
    """A layer that keeps a loss, its activations and a state."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.losses: list[torch.Tensor] = []
        self.state: Any = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.gate(x) + self.state)
        self.losses[:] = [hidden.mean(0).square().sum()]
        self.balance, self.seen = self.losses[0] * 1, hidden
        return self.last(hidden)


class Gathering(nn.Module):
    """A model that adds up what its layers keep."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.layer.balance


class Loop(NamedTuple):
    """A model, and its loss beside that of the output."""

    loss: Callable[[nn.Module, torch.Tensor, list[Any]], Any]
    make: Callable[[], nn.Module] = Experts
    hook: Callable[[list[Any]], Callable[..., None]] | None = None
    retained: bool = False


def keeps(kept: list[Any]) -> Callable[..., None]:
    return lambda module, given, out: kept.append(out)


def retains(kept: list[Any]) -> Callable[..., None]:
    def hook(module: nn.Module, given: Any, out: torch.Tensor) -> None:
        out.retain_grad()
        kept.append(out)

    return hook


def normed() -> nn.Module:
    model = Experts()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weight_norm(model.gate)
    return model


def carried(model: nn.Module, out: torch.Tensor, kept: list[Any]) -> Any:
    """A second forward reads what the first has left."""
    inner = model.module
    inner.state = inner.seen.mean()
    loss = model(torch.ones(len(out), 4, dtype=torch.float64)).square().mean()
    inner.state = 0.0
    return loss


BESIDE = {
    "a loss on a module": Loop(lambda model, out, kept: model.module.balance),
    "a loss in a list": Loop(lambda model, out, kept: model.module.losses[0]),
    "activations on a module": Loop(lambda model, out, kept: model.module.seen.abs().mean()),
    "features of a hook": Loop(lambda model, out, kept: kept[0].abs().mean(), hook=keeps),
}
WITHIN = {
    "kept and not used": Loop(lambda model, out, kept: 0.0, hook=keeps),
    "kept and looked at": Loop(
        lambda model, out, kept: float(model.module.balance + kept[0].sum()) * 0, hook=keeps
    ),
    "its gradient retained": Loop(lambda model, out, kept: 0.0, hook=retains, retained=True),
    "gathered in the forward": Loop(lambda model, out, kept: 0.0, make=Gathering),
    "a weight that is computed": Loop(lambda model, out, kept: 0.0, make=normed),
    "carried into another forward": Loop(carried),
}


def said_of(loop: Loop) -> list[str]:
    """Return what is said of three steps of a loop."""
    torch.manual_seed(0)
    plain, kept = loop.make().double(), []
    if loop.hook is not None:
        plain.gate.register_forward_hook(loop.hook(kept))
    runtime = Runtime(line_every=None, deadline_s=6.0)
    with (
        Balancer(policy=Fixed((14, 6)), runtime=runtime) as balancer,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        parts = DistributedDataParallel(plain), stock(6 * BATCH_SIZE)
        model, loader = balancer.prepare(*parts)
        for x, _ in loader:
            kept.clear()
            out = model(x)
            (out.square().mean() + loop.loss(model, out, kept)).backward()
            assert not loop.retained or kept[0].grad is not None
    said = [str(one.message) for one in caught if one.category is EvenstepWarning]
    return [text for text in said if WORDS in text]


def warnings_beside(rank: int) -> dict[str, list[str]]:
    return {name: said_of(loop) for name, loop in (BESIDE | WITHIN).items()}
