"""Torch's own loader as plain DDP has it, with the methods of a balanced one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any, final

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from .._protocols import Collectives, MicroBatch
from .._step import KnownPortions, Step
from ..deal._stream_terms import StreamKind
from ..fetch._torch_loader import with_parts
from ..order._samplers import has_own_batches, tell_epoch
from ._base import AbstractLoader


@final
class PlainLoader(AbstractLoader):
    """Hands out the batches of torch's own loader, one forward a step.

    Args:
        loader: of this rank's part.
        num_ranks: how many ranks have as many samples.
        tells: whether every loop tells the sampler its number, from 0.
        on_batch: told of each batch and its samples, and of the end of a loop by two Nones.
    """

    _loader: DataLoader[Any]

    def __init__(
        self,
        loader: DataLoader[Any],
        num_ranks: int,
        *,
        tells: bool,
        on_batch: Callable[[Any, int | None], None],
    ) -> None:
        self._loader = loader
        self._num_ranks = num_ranks
        self._tells = tells
        self._on_batch = on_batch
        self._num_begun = 0
        self._num_taken = 0
        self._num_skipped = 0

    @property
    def num_handed_out(self) -> int:
        """Steps of the newest epoch that were handed out."""
        return self._num_taken

    def __len__(self) -> int:
        """Return the steps of an epoch."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        if self._tells:
            self.set_epoch(self._num_begun)
        self._num_begun += 1
        self._num_taken, self._num_skipped = self._num_skipped, 0
        try:
            for batch in islice(self._loader, self._num_taken, None):
                self._num_taken += 1
                self._on_batch(batch, self._num_samples())
                yield batch
        finally:
            self._on_batch(None, None)

    def steps(self) -> Iterator[Step]:
        """Return an iterator over the epoch's steps, each of one micro-batch."""
        for batch in self:
            count = self._num_samples()
            yield Step(
                KnownPortions([MicroBatch(batch, count)]),
                count * self._num_ranks,
                listener=_Silent(),
                no_sync=nullcontext,
                attempts=_Once(),
            )

    def set_epoch(self, epoch: int) -> None:
        """Pass ``epoch`` on to the sampler if it wants to know, and count on from there."""
        self._num_begun = epoch
        tell_epoch(self._loader.sampler, epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where training stands: epochs begun, and steps of the newest."""
        return {"epochs_begun": self._num_begun, "steps_taken": self._num_taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next loop leave out the steps that were taken of an unfinished epoch."""
        begun, taken = state["epochs_begun"], state["steps_taken"]
        unfinished = taken > 0 and (self._is_endless or taken < len(self))
        self._num_begun = begun - unfinished
        self._num_skipped = taken if unfinished else 0

    def skip(self, num_steps: int) -> None:
        """Have the next loop leave out its first steps."""
        self._num_skipped = num_steps

    def close(self) -> None:
        """Do nothing: torch's workers end with their loop."""

    @property
    def _is_endless(self) -> bool:
        """Whether nothing says how long an epoch is."""
        if isinstance(self._loader.dataset, IterableDataset):
            return True
        try:
            len(self._loader.sampler)  # type: ignore[arg-type]
        except TypeError:
            return True
        return False

    def _num_samples(self) -> int:
        """Return the samples of the batch in hand, by counting."""
        size = self._loader.batch_size
        if size is None or self._is_endless:
            return size or 1
        left = len(self._loader.sampler) - (self._num_taken - 1) * size  # type: ignore[arg-type]
        return min(size, left)


def plainly_sharded(
    loader: DataLoader[Any], ranks: Collectives, stream: StreamKind | None
) -> tuple[DataLoader[Any], bool]:
    """Return the loader of this rank's part, and whether it has to be told the epoch.

    As plain DDP has it: with a ``DistributedSampler``, unless the data are sharded already. Other
    samplers and batch samplers are drawn on rank 0, and every rank takes every so many-th index.
    """
    if ranks.world_size == 1 or _is_sharded(loader, stream):
        return loader, False
    if isinstance(loader.dataset, IterableDataset):
        return with_parts(loader, dataset=_Every(loader.dataset, ranks)), False
    if has_own_batches(loader):
        return with_parts(
            loader, batch_sampler=_Part(loader.batch_sampler, ranks, of_each=True)
        ), True
    sampler: Any = loader.sampler
    if type(sampler) is SequentialSampler or _shuffles_all(sampler, loader.dataset):
        sampler = DistributedSampler(
            loader.dataset,
            ranks.world_size,
            ranks.rank,
            shuffle=type(sampler) is RandomSampler,
            seed=ranks.share(torch.initial_seed() % 2**31),
        )
    else:
        sampler = _Part(sampler, ranks)
    assert loader.batch_size is not None
    batches = BatchSampler(sampler, loader.batch_size, loader.drop_last)
    return with_parts(loader, sampler=sampler, batch_sampler=batches), True


def _is_sharded(loader: DataLoader[Any], stream: StreamKind | None) -> bool:
    if isinstance(loader.dataset, IterableDataset):
        return stream != "same"
    inner = getattr(loader.batch_sampler, "sampler", None)
    return any(isinstance(part, DistributedSampler) for part in (loader.sampler, inner))


def _shuffles_all(sampler: Any, dataset: Any) -> bool:
    return (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(dataset)
    )


class _Part:
    """Every so many-th index of a sampler, or of each batch of a batch sampler.

    Drawn on rank 0; the first ones are repeated until all ranks have as many.
    """

    def __init__(self, inner: Any, ranks: Collectives, *, of_each: bool = False) -> None:
        self.inner = inner
        self._ranks = ranks
        self._of_each = of_each

    def __len__(self) -> int:
        num = len(self.inner)
        return num if self._of_each else -(-num // self._ranks.world_size)

    def __iter__(self) -> Iterator[Any]:
        rank, size = self._ranks.rank, self._ranks.world_size
        if not hasattr(self.inner, "__len__"):
            return islice(self.inner, rank, None, size)
        drawn = self._ranks.share(list(self.inner) if rank == 0 else None)
        if self._of_each:
            return iter([_filled(list(batch), size)[rank::size] for batch in drawn])
        return iter(_filled(drawn, size)[rank::size])

    def set_epoch(self, epoch: int) -> None:
        """Pass ``epoch`` on."""
        tell_epoch(self.inner, epoch)


def _filled(items: list[Any], size: int) -> list[Any]:
    """Return ``items`` with the first ones again, up to whole multiples of ``size``."""
    missing = -len(items) % size
    return items + (items * missing)[:missing]


class _Every(IterableDataset[Any]):
    """Every so many-th sample of a stream that all ranks read alike, in whole rounds."""

    def __init__(self, dataset: Any, ranks: Collectives) -> None:
        self.dataset = dataset
        self._place = ranks.rank, ranks.world_size

    def __iter__(self) -> Iterator[Any]:
        rank, size = self._place
        samples = iter(self.dataset)
        while len(some := list(islice(samples, size))) == size:
            yield some[rank]


class _Silent:
    """Takes no note of forwards."""

    def begin_forward(self, *_: Any, **__: Any) -> None:
        """Do nothing."""


class _Once:
    """Runs each forward and backward of a step once."""

    probes = False

    def run(
        self,
        step: int,
        parts: Sequence[MicroBatch],
        closure: Callable[[Any], torch.Tensor],
        through: Callable[[torch.Tensor], Any],
    ) -> torch.Tensor:
        """Return the loss of the only part, detached."""
        (part,) = parts
        loss = closure(part.batch)
        through(loss)
        return loss.detach()
