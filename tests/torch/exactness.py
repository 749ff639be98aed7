"""What the workers of the exactness tests run, and the dull reference beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from evenstep.torch import Balancer, Bounds, Runtime

from .models import Cnn, Gpt, HfStyle, Mlp, WithBuffers, WithDict, WithUnused, mean_loss
from .plans import Restless

BATCH_SIZE = 8  # per rank; 4 ranks make a global batch of 32
NUM_SAMPLES = 32 * 3 + 3  # three full steps and a short one, with fewer samples than ranks
QUIET = Runtime(line_every=None)
UNCHECKED = Runtime(line_every=None, checks_loss=False)


@dataclass(frozen=True)
class Case:
    """A model and how DDP wraps it."""

    model: Callable[[], nn.Module]
    ddp: dict[str, Any] = field(default_factory=dict)
    loop: str = "plain"
    weighting: str = "output"
    reduction: str = "mean"
    decay: float = 1e-3  # a term that does not pass through the output


CASES = {
    "mlp": Case(Mlp),
    "gpt with tied weights": Case(Gpt),
    "cnn": Case(Cnn),
    "dict output": Case(WithDict),
    "model output": Case(HfStyle),
    "buffers": Case(WithBuffers),
    "find_unused_parameters": Case(WithUnused, {"find_unused_parameters": True}),
    "static_graph": Case(Mlp, {"static_graph": True}),
    "gradient_as_bucket_view": Case(Gpt, {"gradient_as_bucket_view": True}),
    "explicit weight": Case(Mlp, weighting="loss"),
    "micro-batches": Case(Mlp, loop="steps", decay=0.0),
    "micro-batches, explicit weight": Case(Mlp, loop="steps", weighting="loss"),
}
CONTROL = Case(Mlp, reduction="sum")  # says "sum" of a mean loss: every weight is 1


def samples() -> TensorDataset:
    """Return features and classes."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_SAMPLES, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(5, (NUM_SAMPLES,), generator=generator))


def order() -> torch.Generator:
    """Return the generator that shuffles, the same for all."""
    return torch.Generator().manual_seed(2)


def flat_gradient(model: nn.Module) -> torch.Tensor:
    """Return all gradients in one vector, zero where a parameter has none."""
    grads = (p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters())
    return torch.cat([grad.flatten() for grad in grads]).clone()


def reference(case: Case, world_size: int) -> list[torch.Tensor]:
    """Return each step's gradient as one process computes it, with torch's own loader."""
    torch.manual_seed(0)
    model = case.model().double()
    gradients = []
    loader = DataLoader(
        samples(), batch_size=BATCH_SIZE * world_size, shuffle=True, generator=order()
    )
    for x, y in loader:
        model.zero_grad()
        mean_loss(model, x, y, decay=case.decay).backward()
        gradients.append(flat_gradient(model))
    return gradients


def balanced(case: Case) -> tuple[list[torch.Tensor], list[tuple[int, ...]]]:
    """Return each step's gradient as the cluster computes it, and the plans it ran under."""
    torch.manual_seed(0)
    model = DistributedDataParallel(case.model().double(), **case.ddp)
    bounds = Bounds(max=6 if case.loop == "steps" else None)
    gradients, sizes = [], []
    runtime = UNCHECKED if case is CONTROL else QUIET
    with Balancer(
        policy=Restless(), bounds=bounds, runtime=runtime, loss_reduction=case.reduction
    ) as balancer:
        model, loader = balancer.prepare(
            model,
            DataLoader(samples(), batch_size=BATCH_SIZE, shuffle=True, generator=order()),
            weighting=case.weighting,
        )
        for step in loader.steps() if case.loop == "steps" else ([batch] for batch in loader):
            model.zero_grad()
            for x, y in step:
                loss = mean_loss(model, x, y, decay=case.decay)
                (balancer.weight(loss) if case.weighting == "loss" else loss).backward()
            gradients.append(flat_gradient(model))
            sizes.append(balancer.batch_sizes)
    return gradients, sizes


def worst_errors(rank: int) -> dict[str, tuple[float, int]]:
    """Return for every case the largest relative error over the steps, and how many plans."""
    found = {}
    for name, case in {**CASES, "control": CONTROL}.items():
        ours, sizes = balanced(case)
        theirs = reference(case, world_size=4)
        assert len(ours) == len(theirs) == 4
        errors = [
            float((mine - plain).norm() / plain.norm())
            for mine, plain in zip(ours, theirs, strict=True)
        ]
        found[name] = (max(errors), len(set(sizes)))
    return found
