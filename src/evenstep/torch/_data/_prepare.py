"""From the user's loader to the balanced one that fits it, also on a rank without data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final, get_args

import torch
from torch.utils.data import DataLoader, IterableDataset

from ...exceptions import invalid
from ._protocols import ANEW
from ._step import Step
from .deal._stream_deal import StreamKind
from .loaders._balanced import BalancedLoader
from .loaders._base import AbstractLoader, AbstractStepLoader, StepContext
from .loaders._stream import StreamLoader
from .order._drawing import has_own_batches


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


def check_is_loader(loader: object) -> None:
    """Raise for what is neither a module nor a ``DataLoader``."""
    if not isinstance(loader, DataLoader):
        remedy = "Pass loaders themselves; optimizers and schedulers stay as they are."
        if hasattr(loader, "iter_rows"):  # Ray Data's iterators and data sets
            remedy = (
                'Put its rows into an `IterableDataset`, and prepare with `stream="same"`: see '
                "docs/recipes/ray.md."
            )
        raise invalid(
            "Balancer.prepare(...)",
            "be given torch modules and `DataLoader`s",
            type(loader).__name__,
            remedy,
        )


def balanced_loader(
    loader: DataLoader[Any],
    stream: StreamKind | None,
    context: StepContext,
    *,
    beside: Sequence[AbstractStepLoader] = (),
) -> AbstractStepLoader:
    """Return ``loader`` as one whose every iteration is a global step.

    Raises:
        ValueError: it cannot be balanced, or ``stream`` does not say who reads what.
        RuntimeError: the run has begun.
    """
    if context.session.steps.plan is not None:
        raise RuntimeError(
            f"The run has begun: `prepare` all loaders before the first loop. For data that come "
            f"later, such as new rollouts, make a Balancer for each iteration. {ANEW}"
        )
    made: AbstractStepLoader
    if stream is None and not isinstance(loader.dataset, IterableDataset):
        made = BalancedLoader(loader, context)
    else:
        kind = _said(stream, loader)
        if context.sample_seed is not None:
            raise invalid(
                "Runtime(sample_seed=...)",
                "be left out with a stream, whose samples draw before they have a place",
                f"a {type(loader.dataset).__name__}",
                "Use a data set that is read by index, or leave `sample_seed` out.",
            )
        if context.cost is not None and kind == "sharded":
            raise invalid(
                "Balancer(cost=...)",
                'be left out with `stream="sharded"`, where no rank can compute samples of another',
                f"a sharded {type(loader.dataset).__name__}",
                'Have every rank read all samples and prepare with `stream="same"`, use a data '
                "set with a length, or leave `cost` out.",
            )
        made = StreamLoader(loader, context, kind=kind)
    tails = [each.tail_batch_size or 0 for each in (*beside[:1], made)]
    if tails[0] != tails[-1]:  # they are trained on in turn, under the same plans
        raise invalid(
            "Balancer.prepare(loader)",
            f"end an epoch as the balancer's first loader does, with {tails[0]} samples in a short "
            f"last step",
            tails[-1],
            "Set `DataLoader(drop_last=True)` on both, or make a balancer for each.",
        )
    return made


def _said(stream: StreamKind | None, loader: DataLoader[Any]) -> StreamKind:
    """Return what the user said of a stream, or raise: data sets do not say who reads what."""
    if stream is not None and stream in get_args(StreamKind):
        return stream
    raise invalid(
        "Balancer.prepare(stream=...)",
        f'be "same" or "sharded" for the {type(loader.dataset).__name__}',
        repr(stream),
        'Say who reads what: "same" if every rank reads all samples in one order, "sharded" if '
        "each reads samples of its own. With data that is read by index, leave it out.",
    )


def agreed_batch_size(given: int | None, loader: DataLoader[Any], world_size: int) -> int:
    """Return the global batch, from the loader or as given where the two agree."""
    if loader.batch_size is None:
        if given is None and has_own_batches(loader):
            raise invalid(
                "Balancer(global_batch_size=...)",
                "be given with a `batch_sampler`, whose batches are then the global ones",
                None,
                "Name their size, over all workers; about their mean where they differ.",
            )
        return given or 1  # the balanced loader refuses what is left, with the remedy
    implied = loader.batch_size * world_size
    if given is None:
        return implied
    if given < world_size:
        raise invalid(
            "Balancer(global_batch_size=...)",
            f"be at least the number of workers, {world_size}",
            given,
            "Raise it, or train on fewer workers.",
        )
    if loader.batch_size not in (given // world_size, -(-given // world_size)):
        raise invalid(
            "Balancer(global_batch_size=...)",
            f"agree with `DataLoader(batch_size={loader.batch_size})` on {world_size} workers, "
            f"which makes {implied}",
            given,
            f"Give the loader `batch_size={-(-given // world_size)}`, or leave "
            f"`global_batch_size` out.",
        )
    return given
