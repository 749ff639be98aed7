"""One pattern run balanced on this rank, and the same loop in one process beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from time import perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from evenstep.policies import AbstractPolicy
from evenstep.torch import Balancer, Runtime

from ._pattern import GLOBAL_BATCH_SIZE, Alone, Balanced, Pattern

RATE = 0.05
IMPATIENT = Runtime(line_every=None, deadline_s=6.0, heartbeat_s=0.5, hang_s=9.0)
PATIENCE = timedelta(seconds=12)  # how long a rank waits for one that raised


class Noted:
    """A loader that notes when each batch was handed out, and how many samples it has.

    It adds no call and keeps no batch.

    Args:
        loader: what is iterated.
        count: from a batch to its number of samples.
        noted: where to note (samples, seconds) of each batch or step.
    """

    def __init__(
        self, loader: Any, count: Callable[[Any], int], noted: list[tuple[int, float]]
    ) -> None:
        self._loader, self._count, self._noted = loader, count, noted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return _NotedIterator(iter(self._loader), self._count, self._noted)

    def steps(self) -> Iterator[Any]:
        """Return an iterator over steps, noted as well."""
        return _NotedIterator(self._loader.steps(), lambda step: step.num_samples, self._noted)


class _NotedIterator:
    def __init__(
        self, batches: Iterator[Any], count: Callable[[Any], int], noted: list[tuple[int, float]]
    ) -> None:
        self._batches, self._count, self._noted = batches, count, noted

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._noted.append((self._count(batch), perf_counter()))
        return batch


@dataclass(frozen=True)
class Trial:
    """How patterns are run.

    Args:
        global_batch_size: samples of a step over all ranks.
        num_samples: length of the data; None is each pattern's own.
        seconds_by_rank: what each sample adds to a forward, slept; None is nothing.
        runtime: of the balancer.
        reduction: what the balancer is told of the loss; wrong on purpose in a control.
    """

    global_batch_size: int = GLOBAL_BATCH_SIZE
    num_samples: int | None = None
    seconds_by_rank: tuple[float, ...] | None = None
    runtime: Runtime = IMPATIENT
    reduction: str = "mean"

    def loaders(self, pattern: Pattern, *, world_size: int, rank: int = 0) -> list[Any]:
        """Return stock loaders, of which each rank has its own."""
        num_samples = self.num_samples or pattern.num_samples
        # Of other lengths, with short last batches alike.
        step = self.global_batch_size
        lengths = [num_samples + step * number for number in range(pattern.num_loaders)]
        return [self._loader(pattern, length, world_size, rank) for length in lengths]

    def _loader(self, pattern: Pattern, length: int, world_size: int, rank: int) -> Any:
        data, settings = pattern.data(length), dict(pattern.loader)
        if settings.get("sampler") == "distributed":
            settings["sampler"] = DistributedSampler(data, world_size, rank)
        settings["generator"] = torch.Generator().manual_seed(0)  # of an order, if it is shuffled
        batch_size = -(-self.global_batch_size // world_size)
        return DataLoader(data, batch_size=batch_size, **settings)

    def alone(self, pattern: Pattern) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all parameters before and after the loop in one process."""
        models = [make() for make in pattern.models]
        before = _flat(models)
        _run(pattern, models, self.loaders(pattern, world_size=1), Alone())
        return before, _flat(models)

    def balanced(
        self, pattern: Pattern, policy: AbstractPolicy[Any] | str, noted: list[tuple[int, float]]
    ) -> torch.Tensor:
        """Return all parameters after the loop on this rank; every rank calls it.

        Gradients have a process group of their own, so that what one pattern leaves behind in it
        meets no other.
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        group = dist.new_group(timeout=PATIENCE)
        plain = [make() for make in pattern.models]
        for module in plain:
            if self.seconds_by_rank is not None:
                module.register_forward_hook(_sleep(self.seconds_by_rank[rank]))
        wrapped = [DistributedDataParallel(module, process_group=group) for module in plain]
        with Balancer(
            self.global_batch_size,
            policy=policy,
            bounds=pattern.bounds,
            runtime=replace(self.runtime, checks_loss=self.reduction == "mean"),
            loss_reduction=self.reduction,  # type: ignore[arg-type]
        ) as balancer:
            loaders = self.loaders(pattern, world_size=world_size, rank=rank)
            parts = balancer.prepare(*wrapped, *loaders, weighting=pattern.weighting)
            models = list(parts[: len(wrapped)])
            handed = [Noted(loader, pattern.count, noted) for loader in parts[len(wrapped) :]]
            _run(pattern, models, handed, Balanced(balancer, group))
        dist.destroy_process_group(group)
        return _flat(plain)


def _run(pattern: Pattern, models: list[nn.Module], loaders: list[Any], run: Any) -> None:
    optimizers = [torch.optim.SGD(model.parameters(), lr=RATE) for model in models]
    pattern.loop(_one_or_all(models), _one_or_all(loaders), _one_or_all(optimizers), run)


def _one_or_all(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else tuple(parts)


def _flat(models: list[nn.Module]) -> torch.Tensor:
    return torch.cat(
        [parameter.detach().flatten() for model in models for parameter in model.parameters()]
    )


def _sleep(seconds_per_sample: float) -> Callable[[nn.Module, Any, Any], None]:
    """Return a hook that makes a forward last as long as its samples."""

    def hook(module: nn.Module, given: Any, output: Any) -> None:
        first = output
        while not isinstance(first, torch.Tensor) or not first.ndim:  # past a loss among outputs
            parts = first if isinstance(first, tuple | dict) else vars(first)
            first = list(parts.values() if isinstance(parts, dict) else parts)[-1]
        sleep(seconds_per_sample * len(first))

    return hook
