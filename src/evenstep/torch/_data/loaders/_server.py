"""Loaders on a rank without data: the same to a script, but for what they hand out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, final

import torch

from .._step import Step
from ._base import AbstractLoader, AbstractStepLoader


@final
class ServerLoader(AbstractLoader):
    """A prepared loader whose loops hand out nothing, and serve meanwhile.

    Its length and its state are those of the workers' before their first step.

    Args:
        loader: prepared as on a worker, and never iterated.
        serve: called at the start of every loop; returns when that loop is over.
    """

    def __init__(self, loader: AbstractStepLoader, serve: Callable[[], None]) -> None:
        self._loader = loader
        self._serve = serve

    def __len__(self) -> int:
        """Return the global steps of an epoch, as on workers."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return self.steps()

    def steps(self) -> Iterator[Step]:
        """Serve, and hand out nothing."""
        self._serve()
        yield from ()


@final
class ServerEval(AbstractLoader):
    """An evaluation on a rank without data, which has no part in it.

    Args:
        loader: the user's own.

    Attributes:
        count: None, as outside of a loop.
    """

    count: int | None = None

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    @property
    def num_samples(self) -> int:
        """Samples of an evaluation over all ranks, if it takes the whole data set."""
        return len(self._loader.dataset)

    def __len__(self) -> int:
        """Return 0: workers evaluate all samples."""
        return 0

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def add(self, name: str, value: float | torch.Tensor, *, count: float | None = None) -> None:
        """Leave out what is given: a server's model is not the trained one."""

    def mean(self) -> dict[str, float]:
        """Return NaN under every name: nothing was evaluated here."""
        return defaultdict(lambda: float("nan"))

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: there is no order."""
