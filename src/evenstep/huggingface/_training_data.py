"""The training data of one `Trainer.train`: steps of the whole cluster, counted in batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

from .._planner import Bounds
from ..torch import BalancedLoader, Balancer
from ..torch._data._step import Step
from ._stock import FirstOf, Stock, per_rank, set_epoch


class TrainingData:
    """A balanced loader, whose step is an optimizer step of `Trainer`.

    `Trainer` accumulates so many batches to a step; the batches of all ranks in it make the
    global batch that is shared out. With accumulation, a forward has at most as many samples as
    ``per_device_train_batch_size`` says, unless ``bounds`` say otherwise: ranks differ in the
    number of their forwards. Without, it has all of the rank's samples, as in every plain loop.

    Args:
        prepared: what `Trainer` made and Accelerate sharded.
        split_batches: whether its batches are those of all ranks together.
        world_size: number of processes.
        num_accumulated: batches to an optimizer step, at least 1.
        loss_reduction: as for ``Balancer``.
        options: further ones for ``Balancer``.

    Attributes:
        balancer: of this training.
        loader: balanced.
    """

    def __init__(
        self,
        prepared: Any,
        *,
        split_batches: bool,
        world_size: int,
        num_accumulated: int,
        loss_reduction: str,
        options: Mapping[str, Any],
    ) -> None:
        stock = Stock(prepared, split_batches=split_batches, world_size=world_size)
        self._batch_size = stock.global_batch_size  # over all ranks, of what Trainer calls a batch
        forward_size = per_rank(self._batch_size, world_size)
        bounds = {"bounds": Bounds(max=forward_size)} if num_accumulated > 1 else {}
        self.balancer = Balancer(
            num_accumulated * self._batch_size,
            loss_reduction=loss_reduction,  # type: ignore[arg-type]
            **{**bounds, **options},
        )
        self.loader: BalancedLoader = self.balancer.prepare(_rebuilt(stock, num_accumulated))
        self.loader.no_sync = nullcontext  # Trainer has its own around these
        self._epoch: Any = None
        self._number = 0
        self._steps: Iterator[Step] | None = None

    def __len__(self) -> int:
        """Return how many batches an epoch has, as Trainer counts them."""
        return -(-self.loader.num_samples // self._batch_size)

    def next_step(self, epoch: Any, global_step: int, *, skips: bool) -> Step | None:
        """Return the next step; None at the end of the epoch.

        Args:
            epoch: Trainer's iterator; another one is another epoch.
            global_step: optimizer steps of the training so far.
            skips: whether training that goes on from a checkpoint leaves out what it has seen.
        """
        if epoch is not self._epoch:
            self._begin(epoch, global_step, skips=skips)
        assert self._steps is not None
        return next(self._steps, None)

    def close(self) -> None:
        """End the run on this rank."""
        self._steps = self._epoch = None
        self.balancer.close()

    def _begin(self, epoch: Any, global_step: int, *, skips: bool) -> None:
        if self._epoch is None:
            self._number, done = divmod(global_step, len(self.loader))
            self.loader.skip(done if skips else 0)
        else:
            self._number += 1
        self._epoch, self._steps = epoch, None  # a loop that was left ends here
        set_epoch(self.loader, self._number)
        self._steps = self.loader.steps()


def _rebuilt(stock: Stock, num_accumulated: int) -> Any:
    if num_accumulated == 1 or not stock.drop_last:
        return stock.rebuild(times=num_accumulated, drop_last=stock.drop_last)
    # Dropped is what makes no whole batch of Trainer's, not what makes no whole step.
    size = stock.global_batch_size
    first = FirstOf(stock.sampler, stock.num_samples // size * size)
    return stock.rebuild(times=num_accumulated, sampler=first, drop_last=False)


class _Nothing(Iterator[Any]):
    """An iterator that ends at once, and differs from all others."""

    def __next__(self) -> Any:
        raise StopIteration


class Epochs:
    """What `Trainer` holds for the training loader: its length, and an iterator for each epoch.

    The iterators yield nothing, they only tell epochs apart. What else Trainer, Accelerate and
    callbacks ask for is the balanced loader's.

    Args:
        data: of the training.
    """

    def __init__(self, data: TrainingData) -> None:
        self._data = data

    def __getattr__(self, name: str) -> Any:
        """Return what the balanced loader has under ``name``, such as ``dataset``."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._data.loader, name)

    @property
    def num_workers(self) -> int:
        """None of its own: a copy of this loader that skips batches would start them."""
        return 0

    @property
    def prefetch_factor(self) -> None:
        """Nothing, without workers."""

    @property
    def multiprocessing_context(self) -> None:
        """Nothing, without workers."""

    @property
    def persistent_workers(self) -> bool:
        """Nothing, without workers."""
        return False

    def __len__(self) -> int:
        """Return the batches of an epoch, as Trainer counts them."""
        return len(self._data)

    def __iter__(self) -> Iterator[Any]:
        return _Nothing()

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: epochs are counted where they begin."""
