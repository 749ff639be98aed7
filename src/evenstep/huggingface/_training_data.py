"""The training data of one `Trainer.train`, and the stock loader inside one that was sharded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from .._planner import Bounds
from ..exceptions import invalid
from ..torch import BalancedLoader, Balancer, Cost
from ..torch._data._step import Step

_KEPT = (
    "collate_fn",
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)


def per_rank(size: int, world_size: int) -> int:
    """Return the local batch size of ``size`` samples that are split equally, rounded up."""
    return -(-size // world_size)


@dataclass(frozen=True, eq=False)
class FirstOf:
    """The first indices of a sampler, or of the batches that it makes, in their order.

    Attributes:
        whole: a sampler of indices, or of batches of them.
        num_samples: how many indices there are.
        makes_batches: whether it is one of batches.
    """

    whole: Any
    num_samples: int
    makes_batches: bool = False

    def __getattr__(self, name: str) -> Any:
        """Return what the sampler has under ``name``: its generator, its ``set_epoch``."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.whole, name)

    def __len__(self) -> int:
        """Return how many indices there are."""
        return self.num_samples

    def __iter__(self) -> Iterator[Any]:
        indices = chain.from_iterable(self.whole) if self.makes_batches else self.whole
        return islice(indices, self.num_samples)


def whole_order(batches: Any) -> FirstOf:
    """Return the order of a ``BatchRebalanceSampler``, without its split by rank.

    Its batches are those of all ranks together in a step, each sample once; it repeats none to
    fill up the last one.
    """
    whole = type(batches)(
        batches.lengths,
        batches.effective_batch_size,
        dp_size=1,
        grad_accum=1,
        shuffle=batches.shuffle,
        seed=batches.seed,
        drop_last=batches.drop_last,
    )
    dropped = whole.remainder if whole.drop_last else 0
    return FirstOf(whole, len(whole.lengths) - dropped, makes_batches=True)


class UnwrappedLoader:
    """A DataLoader as it was before Accelerate prepared it.

    Accelerate makes a loader of its own, with the data set, the workers and the ``collate_fn`` of
    the user's, around a batch sampler that deals out whole batches. The user's batch sampler is
    still in there, and with it the order of all samples. What is dealt out to all ranks in one
    step is the global batch here too, so the steps are those of plain training.

    Args:
        loader: prepared by ``accelerator.prepare``, or not.
        accelerator: says whether a batch of the loader is that of all ranks together.

    Attributes:
        global_batch_size: samples that all ranks take together, for one forward each.
        sampler: gives the order of all samples.
        drop_last: whether a short last batch is left out.
        cost: lengths by which ranks were to be balanced; None where they were not.

    Raises:
        ValueError: which samples make a batch is not left to evenstep, or rank 0 reads for all.
    """

    def __init__(self, loader: Any, accelerator: Any) -> None:
        _check(loader)
        batches = loader.batch_sampler
        while type(batches).__name__ == "BatchSamplerShard":
            batches = batches.batch_sampler
        self._loader = loader
        self._world_size = accelerator.num_processes
        self.cost: Cost | None = None
        if type(batches).__name__ == "BatchRebalanceSampler":
            self.sampler: Any = whole_order(batches)
            self.drop_last = False  # the order leaves it out
            self.global_batch_size = batches.effective_batch_size // batches.grad_accum
            self.cost = Cost(batches.lengths)
            return
        if type(batches) is not BatchSampler:
            raise invalid(
                "DataLoader(...)",
                "have batches that torch makes",
                f"a {type(batches).__name__}",
                "Use `DataLoader(batch_size=..., sampler=...)`.",
            )
        self.sampler = batches.sampler
        self.drop_last = batches.drop_last
        times = 1 if accelerator.split_batches else self._world_size
        self.global_batch_size = batches.batch_size * times

    def rebuild(self, *, times: int = 1) -> DataLoader[Any]:
        """Return a stock loader, of which ``times`` global batches make one of its own."""
        kept = {name: getattr(self._loader, name) for name in _KEPT}
        # Asked for by default in Trainer, which runs without an accelerator too.
        kept["pin_memory"] = kept["pin_memory"] and torch.accelerator.is_available()
        sampler, drop_last = self.sampler, self.drop_last
        if drop_last and times > 1:
            # Dropped is what makes no whole batch of Trainer's, not what makes no whole step.
            size = self.global_batch_size
            sampler, drop_last = FirstOf(sampler, len(sampler) // size * size), False
        return DataLoader(
            self._loader.dataset,
            batch_size=per_rank(times * self.global_batch_size, self._world_size),
            sampler=sampler,
            drop_last=drop_last,
            **kept,
        )


def _check(loader: Any) -> None:
    if not isinstance(loader, DataLoader):
        raise invalid(
            "balance(accelerator, ...)",
            "be given models and one `DataLoader`, as `accelerator.prepare` returned them",
            type(loader).__name__,
            "Leave optimizers and schedulers as they are.",
        )
    if isinstance(loader.dataset, IterableDataset):
        raise invalid(
            "DataLoader(dataset=...)",
            "be read by index with Trainer and Accelerate",
            f"a {type(loader.dataset).__name__}, which is a stream",
            "Load it whole, as by `load_dataset(..., streaming=False)` or `list(stream)`; or train "
            "in a loop of your own: `evenstep.torch.Balancer().prepare(model, loader, "
            'stream="same")`.',
        )
    if type(loader).__name__ == "DataLoaderDispatcher":
        raise invalid(
            "DataLoaderConfiguration(dispatch_batches=...)",
            "be False, so that every rank reads its own samples",
            True,
            "Leave it out, or set it to False.",
        )
    if getattr(loader, "use_stateful_dataloader", False):
        raise invalid(
            "DataLoaderConfiguration(use_stateful_dataloader=...)",
            "be False, since the balanced loader keeps its own state",
            True,
            "Leave it out, and call `accelerator.register_for_checkpointing(loader)`.",
        )


def set_epoch(loader: Any, epoch: int) -> None:
    """Set the epoch of the sampler, or else of the data set, as Accelerate's loader does."""
    if hasattr(loader.sampler, "set_epoch"):
        loader.sampler.set_epoch(epoch)
    elif hasattr(loader.dataset, "set_epoch"):
        loader.dataset.set_epoch(epoch)


class TrainingData:
    """A balanced loader, whose step is an optimizer step of `Trainer`.

    `Trainer` accumulates so many batches to a step; the batches of all ranks in it make the
    global batch that is shared out. With accumulation, a forward has at most as many samples as
    ``per_device_train_batch_size`` says, unless ``bounds`` or the caps of ``cost`` say otherwise:
    ranks differ in the number of their forwards. Without, it has all of the rank's samples, as in
    every plain loop.

    `Trainer` holds it for its training loader. Its length is that in batches; its iterators
    distinguish epochs, and give a callback that reads the data what it gets in plain `Trainer`.
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
        stock = UnwrappedLoader(prepared, accelerator)
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
        is_sharded = self._loader._context.equal_forwards
        context = replace(self._loader._context, equal_forwards=lambda: self._meets or is_sharded())
        if not getattr(accelerator, "is_fsdp2", False):  # where parameters stay whole as well
            context = replace(context, no_sync=nullcontext)  # Trainer has its own around these
        self._loader._context = context
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
        """Begin an epoch: the batches that Trainer made are read only if they are asked for."""
        yield from self._prepared

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: epochs are counted where they begin."""

    def next_step(self, epoch: Any, global_step: int, *, skips: bool) -> Step | None:
        """Return the next step; None at the end of the epoch.

        Args:
            epoch: Trainer's iterator; another one is another epoch.
            global_step: optimizer steps of the training so far.
            skips: whether training that continues from a checkpoint leaves out what it has seen.
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
