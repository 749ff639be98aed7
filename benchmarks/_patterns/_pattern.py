"""What a loop pattern is, and what its loop may ask for beside model, loader and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from evenstep.torch import Balancer, Bounds

from ._data import pairs
from ._models import net

GLOBAL_BATCH_SIZE = 19  # a prime number: no number of ranks divides it
NUM_SAMPLES = 5 * GLOBAL_BATCH_SIZE + 7  # five full steps and a short one


class Run(Protocol):
    """Where a loop runs: in one process with whole batches, or balanced over several."""

    def weight(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss weighted by hand, for patterns with ``weighting="loss"``."""
        ...

    def step(self, batch: Any) -> AbstractContextManager[Any]:
        """Return the explicit form: forwards inside belong to the handed-out ``batch``."""
        ...

    def steps(self, loader: Any) -> Iterator[Any]:
        """Return an iterator over steps of micro-batches."""
        ...

    def no_sync(self, model: nn.Module, *, unless: bool = False) -> AbstractContextManager[Any]:
        """Return DDP's ``no_sync``, or nothing where gradients are to be reduced."""
        ...

    def all_reduce(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks: a collective of the script's own."""
        ...

    def mean(self, value: torch.Tensor) -> float:
        """Return the mean over the global batch."""
        ...

    def evaluation(self, loader: DataLoader[Any]) -> Iterable[Any]:
        """Return a loader for evaluation."""
        ...


@dataclass(frozen=True)
class Pattern:
    """One training loop as people write it.

    Args:
        loop: gets model, loader, optimizer and a ``Run``; where there are several of a kind, a
            tuple. Its docstring says what it is, and where such loops stand.
        remedy: None where the loop must run and be exact. Where it may be refused instead: words
            of the remedy that the error has to name.
        models: what makes each model, before DDP wraps it.
        weighting: where the gradient is weighted, as in ``Balancer.prepare``.
        data: from a number of samples to a data set.
        loader: further arguments of the ``DataLoader``.
        num_loaders: how many loaders over such data are prepared.
        num_samples: length of the data.
        count: from a batch to its number of samples.
        bounds: limits on sizes, such as what makes micro-batches.
        ahead: whether batches are handed out before the times of those before them are known, so
            that sizes do not change at every step.
        timed: whether the benchmark can run it: every step has a batch of its own, and its time is
            that of its samples.
    """

    loop: Callable[[Any, Any, Any, Run], None]
    remedy: str | None = None
    models: tuple[Callable[[], nn.Module], ...] = (net,)
    weighting: Literal["output", "loss"] = "output"
    data: Callable[[int], Dataset[Any]] = pairs
    loader: Mapping[str, Any] = field(default_factory=dict)
    num_loaders: int = 1
    num_samples: int = NUM_SAMPLES
    count: Callable[[Any], int] = lambda batch: len(batch[0])
    bounds: Bounds = Bounds()  # noqa: RUF009  # a frozen value
    ahead: bool = False
    timed: bool = True

    @property
    def name(self) -> str:
        """The loop's name, in words."""
        return self.loop.__name__.replace("_", " ")

    @property
    def origin(self) -> str:
        """What it is and where it stands."""
        return (self.loop.__doc__ or "").strip().splitlines()[0]


class Alone:
    """One process that has the whole batch: what every loop is compared with."""

    def weight(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss: its weight is 1."""
        return loss

    def step(self, batch: Any) -> AbstractContextManager[Any]:
        """Return nothing to enter."""
        return nullcontext()

    def steps(self, loader: Any) -> Iterator[Any]:
        """Return steps of one batch each."""
        return ([batch] for batch in loader)

    def no_sync(self, model: nn.Module, *, unless: bool = False) -> AbstractContextManager[Any]:
        """Return nothing to enter."""
        return nullcontext()

    def all_reduce(self, value: torch.Tensor) -> torch.Tensor:
        """Return the value: it is the only one."""
        return value

    def mean(self, value: torch.Tensor) -> float:
        """Return the value."""
        return float(value)

    def evaluation(self, loader: DataLoader[Any]) -> Iterable[Any]:
        """Return the loader."""
        return loader


@dataclass(frozen=True)
class Balanced:
    """One rank of several, of which each has its part of the batch."""

    balancer: Balancer
    group: dist.ProcessGroup

    def weight(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss weighted."""
        return self.balancer.weight(loss)

    def step(self, batch: Any) -> AbstractContextManager[Any]:
        """Return the balancer's own form."""
        named: AbstractContextManager[Any] = self.balancer.step(batch)  # type: ignore[attr-defined]
        return named

    def steps(self, loader: Any) -> Iterator[Any]:
        """Return the loader's own steps."""
        steps: Iterator[Any] = loader.steps()
        return steps

    def no_sync(self, model: nn.Module, *, unless: bool = False) -> AbstractContextManager[Any]:
        """Return DDP's own."""
        return nullcontext() if unless else model.no_sync()  # type: ignore[operator]

    def all_reduce(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks."""
        total = value.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total

    def mean(self, value: torch.Tensor) -> float:
        """Return the mean over the samples of all ranks."""
        return self.balancer.mean(value)

    def evaluation(self, loader: DataLoader[Any]) -> Iterable[Any]:
        """Return the loader shared out by speed."""
        return self.balancer.prepare_eval(loader)
