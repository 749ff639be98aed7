"""The stock DataLoader inside one that Accelerate sharded."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from ..exceptions import invalid
from ..torch import Cost

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


class FirstOf:
    """A sampler cut short: its first indices alone, as many as make whole batches."""

    def __init__(self, sampler: Any, num_samples: int) -> None:
        self._sampler = sampler
        self._num_samples = num_samples

    def __getattr__(self, name: str) -> Any:
        """Return what the sampler has under ``name``: its generator, its ``set_epoch``."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def __len__(self) -> int:
        """Return how many indices there are."""
        return self._num_samples

    def __iter__(self) -> Iterator[Any]:
        return islice(self._sampler, self._num_samples)


class RebalancedOrder:
    """The order that a ``BatchRebalanceSampler`` takes samples in, without its split by rank.

    Its batches are those of all ranks together in a step, each sample once; it repeats none to
    fill up the last one.

    Args:
        batches: of transformers.
    """

    def __init__(self, batches: Any) -> None:
        self._whole = type(batches)(
            batches.lengths,
            batches.effective_batch_size,
            dp_size=1,
            grad_accum=1,
            shuffle=batches.shuffle,
            seed=batches.seed,
            drop_last=batches.drop_last,
        )

    def __len__(self) -> int:
        """Return how many indices there are."""
        whole = self._whole
        dropped = whole.remainder if whole.drop_last else 0
        return len(whole.lengths) - dropped

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._whole)

    def set_epoch(self, epoch: int) -> None:
        """Have the next pass be that of ``epoch``."""
        self._whole.set_epoch(epoch)


class Stock:
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
            self.sampler: Any = RebalancedOrder(batches)
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
    """Tell the sampler which epoch it is, or else the data set, as Accelerate's loader does."""
    if hasattr(loader.sampler, "set_epoch"):
        loader.sampler.set_epoch(epoch)
    elif hasattr(loader.dataset, "set_epoch"):
        loader.dataset.set_epoch(epoch)
