"""Loops with scalers and recomputed activations.

Each returns what is compared with one process that has the whole batch, for DDP and for FSDP2.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from statistics import median
from time import sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from evenstep.events import StepMeasured
from evenstep.policies import Fixed
from evenstep.torch import Balancer, Bounds, Runtime

from .loops import opened
from .matrix import BATCH_SIZE, QUIET, UNEVEN, flat, network, parameters, samples, wrapped

WRAPS = ("ddp", "fsdp2")
GLOBAL = 3 * BATCH_SIZE


def stock() -> DataLoader:
    return DataLoader(samples(torch.float64), batch_size=BATCH_SIZE)


def wholes() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the global batches."""
    x, y = samples(torch.float64).tensors
    for first in range(0, len(x), GLOBAL):
        yield x[first : first + GLOBAL], y[first : first + GLOBAL]


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def trained_with_scaler(
    model: nn.Module, batches: Iterable[Any], *, overflow: Callable[[], bool]
) -> tuple[torch.Tensor, list[bool], float]:
    """Train with a scaler whose second step overflows where ``overflow`` says so.

    Returns:
        The parameters, which steps left them as they were, and the scale at the end.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    skipped = []
    for step, (x, y) in enumerate(batches):
        before = parameters(model)
        loss = functional.cross_entropy(model(x), y)
        if step == 1 and overflow():
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        skipped.append(torch.equal(before, parameters(model)))
    return parameters(model), skipped, scaler.get_scale()


def scaler(wrap: str) -> dict[str, Any]:
    """One rank overflows in one step; all skip it, and go on like one process that did."""
    with Balancer(policy=Fixed(UNEVEN), runtime=QUIET) as balancer:
        model, loader = balancer.prepare(wrapped(network(torch.float64), wrap), stock())
        ours, skipped, scale = trained_with_scaler(
            model, loader, overflow=lambda: dist.get_rank() == 2
        )
    theirs, _, their_scale = trained_with_scaler(
        network(torch.float64), wholes(), overflow=lambda: True
    )
    return {
        "error": difference(ours, theirs),
        "skipped": skipped,
        "scales": (scale, their_scale),
    }


class Recomputed(nn.Module):
    """Its first half runs again in the backward; a rank may be slow in it."""

    def __init__(self, *, reentrant: bool, seconds: float) -> None:
        torch.manual_seed(4)
        super().__init__()
        self.first, self.last = nn.Linear(12, 16).double(), nn.Linear(16, 5).double()
        self.reentrant, self.seconds = reentrant, seconds

    def half(self, x: torch.Tensor) -> torch.Tensor:
        sleep(self.seconds)
        return torch.tanh(self.first(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()  # without it, reentrant checkpointing sees no gradient
        return self.last(checkpoint(self.half, x, use_reentrant=self.reentrant))


def recomputed(wrap: str, *, reentrant: bool) -> dict[str, Any]:
    """Return the error, and the median compute time by rank: a step may collect garbage."""
    times: list[tuple[float, ...]] = []

    def hook(event: object) -> None:
        if isinstance(event, StepMeasured):
            times.append(event.compute_s)

    runtime = Runtime(line_every=None, hooks=(hook,))
    seconds = 0.05 if dist.get_rank() == 0 else 0.0
    bounds = Bounds(max=7) if wrap == "fsdp2" else Bounds()
    errors = []
    with Balancer(policy=Fixed(UNEVEN), bounds=bounds, runtime=runtime) as balancer:
        module = wrapped(Recomputed(reentrant=reentrant, seconds=seconds), wrap)
        model, loader = balancer.prepare(module, stock())
        looped = loader.steps() if wrap == "fsdp2" else ([batch] for batch in loader)
        for step, (x, y) in zip(looped, wholes(), strict=True):
            for mine, classes in step:
                functional.cross_entropy(model(mine), classes).backward()
            alone = Recomputed(reentrant=False, seconds=0.0)
            functional.cross_entropy(alone(x), y).backward()
            errors.append(difference(flat(model), flat(alone)))
            model.zero_grad()
    usual_s = [median(each) for each in zip(*times, strict=True)]
    return {"error": max(errors), "compute_s": usual_s or None}


def compressed(rank: int, uneven: bool) -> float:
    """Return the error of gradients that DDP sends in half precision."""
    model = DistributedDataParallel(network(torch.float64))
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    errors = []
    policy = Fixed(UNEVEN) if uneven else "equal"
    with Balancer(policy=policy, runtime=QUIET) as balancer:
        model, loader = balancer.prepare(model, stock())
        for (x, y), whole in zip(loader, wholes(), strict=True):
            functional.cross_entropy(model(x), y).backward()
            alone = network(torch.float64)
            functional.cross_entropy(alone(whole[0]), whole[1]).backward()
            errors.append(difference(flat(model), flat(alone)))
            model.zero_grad()
    return max(errors)


LOOPS: dict[str, Callable[[str], dict[str, Any]]] = {
    "scaler": scaler,
    "reentrant": lambda wrap: recomputed(wrap, reentrant=True),
    "not reentrant": lambda wrap: recomputed(wrap, reentrant=False),
}


def found_in(rank: int) -> dict[Any, Any]:
    """Return what each loop found, by name and wrapper."""
    found: dict[Any, Any] = {uneven: compressed(rank, uneven) for uneven in (False, True)}
    return found | {(name, wrap): loop(wrap) for name, loop in LOOPS.items() for wrap in WRAPS}


def warnings_of_left_steps(rank: int) -> dict[bool, int]:
    """Return how often a loop is warned of that leaves its steps early, after a backward or not."""
    said = {}
    for is_trained in (True, False):
        balancer, ddp, loader = opened(bounds=Bounds(max=5))
        with balancer, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in loader.steps():
                for x, _ in step:
                    if is_trained:
                        ddp(x).square().mean().backward()
                    break
                ddp.zero_grad()
        said[is_trained] = sum("was left before the last one" in str(one.message) for one in caught)
    return said
