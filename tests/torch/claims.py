"""What the workers of the tests of claims run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from evenstep.claims import Hybrid
from evenstep.events import ClaimsSwitched, StepMeasured
from evenstep.policies import Auto, Equal, Fixed
from evenstep.torch import Balancer, Bounds, Runtime

from .counts import Linear, stock
from .loops import text_of
from .matrix import flat, wrapped
from .plans import Restless
from .stream_fakes import Numbers

TAIL = 48 * 6 + 13
BY_FOUR = Bounds(vary="count", granularity=4)
CLAIMS = Runtime(line_every=None, claims=Hybrid(first=0.25))


class Slow(torch.autograd.Function):
    """Nothing, but that its backward takes a while."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


def run(
    wrap: str,
    num_samples: int,
    policy: Any,
    *,
    bounds: Bounds | None = None,
    runtime: Runtime = CLAIMS,
    all_at_once: bool = False,
    sample_s: float = 0.0,
    **options: Any,
) -> dict[str, Any]:
    """Return what an epoch gave here: rows of every forward, samples, errors, counts."""
    rows: list[list[int]] = []
    seen, errors, said = [], [], []
    x = stock(num_samples).dataset.tensors[0]
    size = 16 * dist.get_world_size()
    with Balancer(policy=policy, bounds=bounds or Bounds(), runtime=runtime) as balancer:
        model, loader = balancer.prepare(wrapped(Linear(), wrap), stock(num_samples, **options))
        for number, step in enumerate(loader.steps()):
            rows.append([])
            if all_at_once:
                rows[-1] = [part.num_samples for part in step.micro_batches]
                step.backward(lambda batch: (model(batch[0]) ** 2).mean())
                seen += torch.cat([part.batch[1] for part in step.micro_batches]).tolist()
            else:
                for mine, numbers in step:
                    rows[-1].append(len(mine))
                    if step.num_samples:
                        seen += numbers.tolist()
                    (Slow.apply(model(mine), sample_s * len(mine)) ** 2).mean().backward()
            said.append((step.num_samples, step.num_micro_batches, balancer.num_samples))
            alone = Linear()
            (alone(x[size * number : size * number + size]) ** 2).mean().backward()
            errors.append(float((flat(model) - flat(alone)).norm() / flat(alone).norm()))
            model.zero_grad()
        counts = loader.fetch_counts
    return {
        "rows": rows,
        "seen": seen,
        "error": max(errors),
        "said": said,
        "fetched": (counts.requested, counts.used),
    }


SLOW = {"policy": Equal(), "sample_s": 0.002}
"""Rank 2 takes so long for each of its samples."""
EPOCHS: dict[str, tuple[str, dict[str, Any]]] = {
    "restless": ("ddp", {"policy": Restless()}),
    "restless, workers": ("ddp", {"policy": Restless(), "num_workers": 2}),
    "restless, fsdp2": ("fsdp2", {"policy": Restless()}),
    "count": ("ddp", {"policy": Restless(), "bounds": BY_FOUR}),
    "count, workers": ("ddp", {"policy": Restless(), "bounds": BY_FOUR, "num_workers": 1}),
    "one is slow": ("ddp", SLOW),
    "one is slow, workers": ("ddp", SLOW | {"num_workers": 2}),
    "one is slow, count": ("ddp", SLOW | {"bounds": BY_FOUR}),
    "one has nothing": ("ddp", {"policy": Fixed((24, 24, 0)), "bounds": Bounds(min=0)}),
    "all at once": ("ddp", {"policy": Restless(), "all_at_once": True}),
}


def epochs(rank: int, names: Sequence[str]) -> dict[str, Any]:
    """Return what came of epochs with short last steps: wrappers, workers, plans that change."""
    found = {}
    for name in names:
        wrap, settings = EPOCHS[name]
        mine = settings if rank == 2 else settings | {"sample_s": 0.0}
        found[name] = run(wrap, TAIL, **mine)
    return found


def ahead(rank: int, depth: int, *, whole: bool) -> tuple[list[int], float]:
    """Return what a loop counts amiss that takes so many steps before it uses the first of them.

    And the largest gradient error.
    """
    x = stock(32 * 16).dataset.tensors[0]
    errors, amiss = [], []
    with Balancer(policy=Equal(), runtime=CLAIMS) as balancer:
        model, loader = balancer.prepare(DistributedDataParallel(Linear()), stock(32 * 16))
        steps, waiting = loader.steps(), deque[Any]()
        for number in range(len(loader)):
            waiting.extend(islice(steps, depth + 1 - len(waiting)))
            step = waiting.popleft()
            if whole:
                step.backward(lambda batch: (model(batch[0]) ** 2).mean())
            else:
                for mine, _ in step:
                    (model(mine) ** 2).mean().backward()
            amiss.append(balancer.num_samples - step.num_samples)
            alone = Linear()
            (alone(x[32 * number : 32 * number + 32]) ** 2).mean().backward()
            errors.append(float((flat(model) - flat(alone)).norm() / flat(alone).norm()))
            model.zero_grad()
    return amiss, max(errors)


def by_auto(rank: int) -> tuple[list[ClaimsSwitched], int]:
    """Return when `auto` switched claims, and how many steps were measured."""
    events: list[Any] = []
    runtime = Runtime(line_every=None, hooks=(events.append,))
    with Balancer(policy=Auto(), runtime=runtime) as balancer:
        model, loader = balancer.prepare(DistributedDataParallel(Linear()), stock(32 * 40))
        for number, step in enumerate(loader.steps()):
            slow = 4.0 if number % 3 == rank else 1.0
            for mine, _ in step:
                (Slow.apply(model(mine), 0.0005 * slow * len(mine)) ** 2).mean().backward()
            model.zero_grad()
    switched = [event for event in events if isinstance(event, ClaimsSwitched)]
    return switched, sum(isinstance(event, StepMeasured) for event in events)


def opened(claims: Any, *, plain: bool = False, **settings: Any) -> None:
    model, stream = settings.pop("model", Linear)(), settings.pop("stream", None)
    data = stock(96) if stream is None else DataLoader(Numbers(96), batch_size=16)
    balancer = Balancer(runtime=Runtime(line_every=None, claims=claims), **settings)
    _, loader = balancer.prepare(DistributedDataParallel(model), data, stream=stream)
    next(iter(loader) if plain else loader.steps())


MISTAKES = {
    "plain loop": (dict(plain=True), "got a loop over `loader`. Loop over `loader.steps()`"),
    "units": (dict(unit=lambda batch: 1.0), "got a unit other than samples"),
    "granularities": (
        dict(bounds=Bounds(granularity=(4, 2))),
        "got different granularities, (4, 2)",
    ),
    "stream": (dict(stream="same"), "got an `IterableDataset`"),
    "probe": (dict(bounds=Bounds(max="probe")), "got `Bounds(max='probe')`"),
    "norm": (
        dict(model=lambda: nn.Sequential(Linear(), nn.BatchNorm1d(2)).double()),
        'Use `Bounds(vary="count")`',
    ),
}


def mistakes(rank: int) -> dict[str, str]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            name: text_of(lambda given=given: opened(Hybrid(), **given))
            for name, (given, _) in MISTAKES.items()
        }


def two_models(rank: int) -> dict[str, float]:
    """Return the largest gradient error of two models in one loop, whose counts differ by rank."""
    found = {}
    for name, runtime in (("as planned", Runtime(line_every=None)), ("claimed", CLAIMS)):
        x = stock(48 * 5).dataset.tensors[0]
        errors = []
        with Balancer(policy=Fixed((32, 16)), bounds=Bounds(max=(16, 48)), runtime=runtime) as it:
            first, second, loader = it.prepare(
                DistributedDataParallel(Linear()),
                DistributedDataParallel(Linear()),
                stock(48 * 5, batch_size=24),
            )
            for number, step in enumerate(loader.steps()):
                for mine, _ in step:
                    (first(mine) ** 2).mean().backward()
                    (second(mine) ** 4).mean().backward()
                for model, power in ((first, 2), (second, 4)):
                    alone = Linear()
                    (alone(x[48 * number : 48 * number + 48]) ** power).mean().backward()
                    errors.append(float((flat(model) - flat(alone)).norm() / flat(alone).norm()))
                    model.zero_grad()
        found[name] = max(errors)
    return found
