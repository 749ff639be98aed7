"""What the workers of the tests of outputs that are changed in place run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from evenstep.policies import Fixed
from evenstep.torch import Balancer, Runtime

SIZES = (14, 6)


class Net(nn.Module):
    """Two layers, whose output ``end`` makes of what they say."""

    def __init__(self, end: Callable[[nn.Module, torch.Tensor], Any]) -> None:
        super().__init__()
        self.first, self.last, self.end = nn.Linear(4, 8), nn.Linear(8, 3), end

    def forward(self, x: torch.Tensor) -> Any:
        return self.end(self, self.last(torch.tanh(self.first(x))))


class Case(NamedTuple):
    """A model's output, and what a script does to it."""

    end: Callable[[nn.Module, torch.Tensor], Any]
    loss: Callable[[Any], torch.Tensor]
    wrap: str = "ddp"


def divided(out: torch.Tensor) -> torch.Tensor:
    out /= 0.5
    return out.square().mean()


def masked(out: torch.Tensor) -> torch.Tensor:
    out[out > 0.1] = 0
    return out.square().mean()


def shifted_twice(out: torch.Tensor) -> torch.Tensor:
    before = out.exp().mean()
    out.add_(1.0).mul_(2.0)
    return out.square().mean() + before


def squeezed(out: torch.Tensor) -> torch.Tensor:
    return out.unsqueeze_(0).mul_(3.0).square().mean()


def both(out: Any) -> torch.Tensor:
    first, second = out
    first /= 0.5
    return first.square().mean() + second.abs().mean()


def apart(model: nn.Module, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return out, out.square().sum(1)


def kept(model: nn.Module, out: torch.Tensor) -> torch.Tensor:
    return out


CASES = {
    "divided": Case(kept, divided),
    "masked": Case(kept, masked),
    "shifted twice": Case(kept, shifted_twice),
    "squeezed": Case(kept, squeezed),
    "a part of what was computed": Case(lambda model, out: out[:, 0], divided),
    "one of two": Case(lambda model, out: (out, 2 * out), both),
    "one twice": Case(lambda model, out: (out, out), both),
    "of a compiled model": Case(kept, divided, "compiled"),
    "of FSDP2": Case(kept, divided, "fsdp2"),
}
REFUSED = {  # by torch without evenstep too
    "saved for the backward": Case(lambda model, out: out.sigmoid(), divided),
    "read by what was computed from it": Case(apart, both),
    "two parts of one": Case(lambda model, out: out.chunk(2, 1), both),
    "a parameter": Case(lambda model, out: (model.last.bias, out), both),
    "a part of a parameter": Case(lambda model, out: (model.last.bias[:2], out), both),
}
OURS = {  # torch changes both outputs, with both their gradients
    "a part beside the whole": Case(lambda model, out: (out, out[:, :1]), both),
}


def gradient(model: nn.Module) -> torch.Tensor:
    grads = [one.grad for one in model.parameters()]
    return torch.cat(
        [(one.full_tensor() if isinstance(one, DTensor) else one).flatten() for one in grads]
    )


def network(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return Net(case.end).double()


def samples() -> torch.Tensor:
    draw = torch.Generator().manual_seed(5)
    return torch.randn(sum(SIZES), 4, generator=draw, dtype=torch.float64)


def balanced(case: Case) -> torch.Tensor:
    """Return the gradient of one step of this cluster."""
    model = network(case)
    if case.wrap == "fsdp2":
        fully_shard(model)
    elif case.wrap == "compiled":
        model = torch.compile(model, backend="aot_eager")
    model = model if case.wrap == "fsdp2" else DistributedDataParallel(model)
    loader = DataLoader(TensorDataset(samples()), batch_size=sum(SIZES) // 2)
    with Balancer(policy=Fixed(SIZES), runtime=Runtime(line_every=None)) as balancer:
        model, loader = balancer.prepare(model, loader)
        for (x,) in loader:
            case.loss(model(x)).backward()
    return gradient(model)


def alone(case: Case) -> torch.Tensor:
    """Return the gradient of one process with the whole batch."""
    model = network(case)
    case.loss(model(samples())).backward()
    return gradient(model)


def found_in(rank: int) -> dict[str, float | tuple[str, str]]:
    """Return by case the gradient's error, or what a cluster and one process raised."""
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        ours, theirs = balanced(case), alone(case)
        found[name] = float((ours - theirs).norm() / theirs.norm())
    for name, case in (REFUSED | OURS).items():
        found[name] = text_of(balanced, case), text_of(alone, case)
    return found


def text_of(call: Callable[[Case], torch.Tensor], case: Case) -> str:
    try:
        call(case)
    except RuntimeError as error:
        return str(error)
    return ""
