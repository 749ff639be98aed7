"""The training data of one `Trainer.train`: steps of the whole cluster, counted in batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from .._planner import Bounds
from ..torch import BalancedLoader, Balancer, Cost
from ..torch._data._step import Step
from ._stock import Stock, per_rank, set_epoch


class TrainingData:
    """A balanced loader, whose step is an optimizer step of `Trainer`.

    `Trainer` accumulates so many batches to a step; the batches of all ranks in it make the
    global batch that is shared out. With accumulation, a forward has at most as many samples as
    ``per_device_train_batch_size`` says, unless ``bounds`` or the caps of ``cost`` say otherwise:
    ranks differ in the number of their forwards. Without, it has all of the rank's samples, as in
    every plain loop.

    `Trainer` holds it for its training loader. Its length is that in batches; its iterators tell
    epochs apart, and yield a callback that looks into the data what it gets in plain `Trainer`.
    What else Trainer, Accelerate and callbacks ask for is the balanced loader's, but for workers
    and the generator: a copy of this loader that skips batches would start them, and draw from it,
    so that an order drawn after that would be another one than before a restart.
    """

    num_workers = 0
    prefetch_factor = None
    multiprocessing_context = None
    persistent_workers = False

    def __init__(
        self,
        prepared: Any,
        accelerator: Any,
        dataset: Any,
        *,
        num_accumulated: int,
        loss_reduction: str,
        options: Mapping[str, Any],
    ) -> None:
        stock = Stock(prepared, accelerator)
        self._prepared = prepared
        self.generator = torch.Generator()
        self._batch_size = stock.global_batch_size  # over all ranks, of what Trainer calls a batch
        forward_size = per_rank(self._batch_size, accelerator.num_processes)
        limits: dict[str, Any] = {}
        if (cost := Cost.given(options.get("cost", stock.cost))) is not None:
            cost = cost.read(dataset)
            if num_accumulated > 1 and not cost.is_capped:
                cost = replace(cost, max_samples=forward_size)
        elif num_accumulated > 1:
            limits = {"bounds": Bounds(max=forward_size)}
        self.balancer = Balancer(
            num_accumulated * self._batch_size,
            loss_reduction=loss_reduction,  # type: ignore[arg-type]
            **{**limits, **options, "cost": cost},
        )
        self.balancer._parts.hints_unit = False  # the first step finds out
        self._loader: BalancedLoader = self.balancer.prepare(stock.rebuild(times=num_accumulated))
        self._meets = False
        self._loader._context = replace(
            self._loader._context,
            no_sync=nullcontext,  # Trainer has its own around these
            equal_forwards=lambda: self._meets,
        )
        self._epoch: Any = None
        self._number = 0
        self._steps: Iterator[Step] | None = None

    def __getattr__(self, name: str) -> Any:
        """Return what the balanced loader has under ``name``, such as ``dataset``."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        """Return how many batches an epoch has, as Trainer counts them."""
        return int(-(-self._loader.num_samples // self._batch_size))

    def __iter__(self) -> Iterator[Any]:
        return _Epoch(self._prepared)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: epochs are counted where they begin."""

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

    def meet_in_forwards(self) -> None:
        """Have all ranks make as many forwards from the next step on, where plans go by cost."""
        self._meets = True
        self._loader.equal_forwards()

    def close(self) -> None:
        """End the run on this rank."""
        self._steps = self._epoch = None
        self.balancer.close()

    def _begin(self, epoch: Any, global_step: int, *, skips: bool) -> None:
        if self._epoch is None:
            self._number, done = divmod(global_step, len(self._loader))
            self._loader.skip(done if skips else 0, epochs_begun=self._number)
        else:
            self._number += 1
        self._epoch, self._steps = epoch, None  # a loop that was left ends here
        set_epoch(self._loader, self._number)
        self._steps = self._loader.steps()


class _Epoch(Iterator[Any]):
    """An epoch of Trainer's, which differs from all others; to callbacks the batches of a loader.

    Args:
        loader: as `Trainer` made it. It is read from only if batches are asked for.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._batches: Iterator[Any] | None = None

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = iter(self._loader)
        return next(self._batches)
