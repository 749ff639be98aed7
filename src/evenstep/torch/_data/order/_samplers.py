"""Samplers that can give one order for all ranks; a batch sampler gives global batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from ....exceptions import invalid


class GlobalBatches:
    """A batch sampler as the sampler of one order, whose steps are its batches.

    Step $k$ trains on batch $k$, whatever the plan: so a batch sampler that groups, by length or
    up to so many tokens, groups global batches. They may have any sizes. Torch's own
    ``BatchSampler`` has one size, which is that of the global batch; of any other, the batches of
    an epoch are drawn at its begin.

    Args:
        batches: the user's.
        global_batch_size: samples of a step that plans are made for.

    Attributes:
        sizes: of the batches of the newest epoch, where they were drawn; else empty.

    Raises:
        ValueError: it shards, or is torch's own with batches of another size.
    """

    def __init__(self, batches: Iterable[Any], global_batch_size: int) -> None:
        self.sampler = getattr(batches, "sampler", None)
        self.sizes: list[int] = []
        self._batches = batches
        self._size = global_batch_size
        self._check()

    @property
    def is_torchs(self) -> bool:
        """Whether it is torch's own, all of whose batches but the last have one size."""
        return type(self._batches) is BatchSampler

    @property
    def generator(self) -> torch.Generator | None:
        """The generator that it draws from, or the sampler inside it; None if they show none."""
        own = getattr(self._batches, "generator", None)
        found = own if own is not None else getattr(self.sampler, "generator", None)
        return found if isinstance(found, torch.Generator) else None

    @property
    def epoch(self) -> int:
        """The epoch that was last set on it, or on the sampler inside it."""
        return int(getattr(self._batches, "epoch", getattr(self.sampler, "epoch", 0)))

    def set_epoch(self, epoch: int) -> None:
        """Pass ``epoch`` on, to the batch sampler and the sampler inside it."""
        pass_epoch(self._batches, epoch)
        pass_epoch(self.sampler, epoch)

    def __len__(self) -> int:
        """Return the samples of an epoch of torch's own batches."""
        if self._batches.drop_last:  # type: ignore[attr-defined]
            return self._size * len(self._batches)  # type: ignore[arg-type]
        return len(self.sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self._batches)

    def draw(self, most: int) -> list[Any]:
        """Return the indices of the next epoch, and keep the ``sizes`` of its batches.

        Args:
            most: batches, should it have no length; one that yields more may never end.

        Raises:
            ValueError: it yields no batch, an empty one, or far more than its length says.
        """
        known = length_of(self._batches)
        most = most if known is None else 2 * max(known, 1)
        drawn = [list(batch) for batch in islice(self._batches, most + 1)]
        self.sizes = [len(batch) for batch in drawn]
        if not drawn or 0 in self.sizes:
            found = f"an empty one as batch {self.sizes.index(0)}" if drawn else "no batch"
            raise invalid(
                "DataLoader(batch_sampler=...)",
                "yield batches of at least one sample each, and one of them or more",
                found,
                "Make it iterable in every epoch, and leave out batches without samples.",
            )
        if len(drawn) > most:
            raise invalid(
                "DataLoader(batch_sampler=...)",
                "come to an end, as the batches of an epoch are drawn at its begin",
                f"more than {most} batches of a {type(self._batches).__name__} "
                + ("without a length" if known is None else f"of length {known}"),
                "Give it a `__len__` that returns about how many batches it yields an epoch.",
            )
        return list(chain.from_iterable(drawn))

    def _check(self) -> None:
        name = type(self._batches).__name__
        if isinstance(self.sampler, DistributedSampler) and self.sampler.num_replicas > 1:
            raise invalid(
                "DataLoader(batch_sampler=...)",
                "yield batches of the whole data set",
                f"{name} over a DistributedSampler, which shards",
                "Give it a sampler that does not shard, and batches of the global size.",
            )
        if self.is_torchs and self._batches.batch_size != self._size:  # type: ignore[attr-defined]
            raise invalid(
                "DataLoader(batch_sampler=...)",
                f"yield global batches of {self._size} samples each",
                f"batches of {self._batches.batch_size}",  # type: ignore[attr-defined]
                "Give `Balancer(global_batch_size=...)` their size, or leave the batches to "
                "`DataLoader(batch_size=..., sampler=...)`.",
            )


def length_of(part: Any) -> int | None:
    """Return the length of a data set or a sampler, where it knows one."""
    try:
        return len(part)
    except Exception:  # of the user's own `__len__`, or of one that is none
        return None


def pass_epoch(part: Any, epoch: int) -> None:
    """Pass ``epoch`` on to a sampler or data set that wants to know; others shuffle unasked."""
    if hasattr(part, "set_epoch"):
        part.set_epoch(epoch)


def has_own_batches(loader: Any) -> bool:
    """Return whether a ``DataLoader`` was given a ``batch_sampler``."""
    return loader.batch_size is None and loader.batch_sampler is not None


def draws_at_random(sampler: object) -> bool:
    """Return whether samples come in a random order, so that ranks' parts differ but by chance."""
    shuffles = isinstance(sampler, DistributedSampler) and sampler.shuffle
    return shuffles or isinstance(sampler, RandomSampler)


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
