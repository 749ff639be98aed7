"""Samplers that can give one order for all ranks; a batch sampler gives global batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from ....exceptions import invalid


class GlobalBatches:
    """A batch sampler as the sampler of one order, whose steps are its batches.

    Step $k$ trains on batch $k$, whatever the plan: so a batch sampler that groups, by length
    say, groups global batches. All have to have the size of the global batch, as steps are cut
    from the order by counting; torch's own ``BatchSampler`` may end with a shorter one.

    Args:
        batches: the user's, with a length.
        global_batch_size: samples of a full step.

    Raises:
        ValueError: it shards, has no length, or makes batches of another size.
    """

    def __init__(self, batches: Iterable[Any], global_batch_size: int) -> None:
        self.sampler = getattr(batches, "sampler", None)
        self._batches = batches
        self._size = global_batch_size
        self._check()

    @property
    def generator(self) -> torch.Generator | None:
        """The generator that it draws from, or the sampler inside it; None if they show none."""
        own = getattr(self._batches, "generator", None)
        found = own if own is not None else getattr(self.sampler, "generator", None)
        return found if isinstance(found, torch.Generator) else None

    @property
    def epoch(self) -> int:
        """The epoch that it was told last, or the sampler inside it."""
        return int(getattr(self._batches, "epoch", getattr(self.sampler, "epoch", 0)))

    def set_epoch(self, epoch: int) -> None:
        """Pass ``epoch`` on, to the batch sampler and the sampler inside it."""
        tell_epoch(self._batches, epoch)
        tell_epoch(self.sampler, epoch)

    def __len__(self) -> int:
        """Return the samples of an epoch."""
        if type(self._batches) is BatchSampler and not self._batches.drop_last:
            return len(self.sampler)  # type: ignore[arg-type]
        return self._size * len(self._batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        left = len(self)
        for number, batch in enumerate(self._batches):
            indices = list(batch)
            wanted = min(left, self._size)
            if len(indices) != wanted:
                raise invalid(
                    "DataLoader(batch_sampler=...)",
                    f"yield global batches of {self._size} samples each",
                    f"{len(indices)} in batch {number}",
                    "Give `Balancer(global_batch_size=...)` their size; drop or fill up those of "
                    "another one. If they differ by design, as packs of so many tokens do, make "
                    "a data set of the packs, `[[dataset[i] for i in batch] for batch in ...]`, "
                    "and use `DataLoader(packs, batch_size=..., collate_fn=...)`; or leave packing "
                    "out and use `Balancer(cost=Cost(lengths, max_size=...))`.",
                )
            left -= wanted
            yield from indices

    def _check(self) -> None:
        name = type(self._batches).__name__
        if isinstance(self.sampler, DistributedSampler) and self.sampler.num_replicas > 1:
            raise invalid(
                "DataLoader(batch_sampler=...)",
                "yield batches of the whole data set",
                f"{name} over a DistributedSampler, which shards",
                "Give it a sampler that does not shard, and batches of the global size.",
            )
        if not hasattr(self._batches, "__len__"):
            raise invalid(
                "DataLoader(batch_sampler=...)",
                "have a length",
                name,
                "Give it a `__len__` that returns how many batches it yields an epoch.",
            )
        if type(self._batches) is BatchSampler and self._batches.batch_size != self._size:
            raise invalid(
                "DataLoader(batch_sampler=...)",
                f"yield global batches of {self._size} samples each",
                f"batches of {self._batches.batch_size}",
                "Give `Balancer(global_batch_size=...)` their size, or leave the batches to "
                "`DataLoader(batch_size=..., sampler=...)`.",
            )


def tell_epoch(part: Any, epoch: int) -> None:
    """Pass ``epoch`` on to a sampler or data set that wants to know; others shuffle unasked."""
    if hasattr(part, "set_epoch"):
        part.set_epoch(epoch)


def has_own_batches(loader: Any) -> bool:
    """Tell whether a ``DataLoader`` was given a ``batch_sampler``."""
    return loader.batch_size is None and loader.batch_sampler is not None


def check_iterates(loader: DataLoader[Any], where: str) -> None:
    """Raise for a ``DataLoader`` with an iteration of its own; ``where`` is for the error."""
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise invalid(
            where,
            "be a DataLoader that iterates as torch's does",
            type(loader).__name__,
            "Give the DataLoader inside it, before another library prepared it.",
        )


def check_order(loader: DataLoader[Any], world_size: int, *, batches: bool) -> None:
    """Raise unless ``loader`` can be given a global order, by ``batches`` of its own perhaps."""
    where = "BalancedLoader(loader=...)"
    if loader.batch_size is None and not (batches and has_own_batches(loader)):
        got = "a custom batch_sampler" if has_own_batches(loader) else "batch_size=None"
        raise invalid(
            where,
            "leave it to evenstep which samples make a batch",
            got,
            "Use `DataLoader(batch_size=..., sampler=...)`.",
        )
    check_iterates(loader, where)
    _check_sampler(loader.sampler, world_size)
    if not batches and not hasattr(loader.sampler, "__len__"):
        raise invalid(
            "DataLoader(sampler=...)",
            "have a length",
            type(loader.sampler).__name__,
            "Give it a `__len__` that returns how many indices it yields an epoch.",
        )


def _check_sampler(sampler: object, world_size: int) -> None:
    if isinstance(sampler, DistributedSampler):
        if type(sampler).__iter__ is not DistributedSampler.__iter__:
            raise invalid(
                "DataLoader(sampler=...)",
                "yield the order of the whole data set",
                f"{type(sampler).__name__}, a DistributedSampler of its own kind",
                "Give a sampler that does not shard: evenstep does.",
            )
        if sampler.num_replicas != world_size:
            raise invalid(
                "DistributedSampler(num_replicas=...)",
                f"be the {world_size} ranks that are balanced",
                sampler.num_replicas,
                "Leave the sampler out and use `DataLoader(shuffle=True)`.",
            )
