"""One order of the whole data set for each epoch, drawn on rank 0 by the user's own sampler."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler

from .._types import IntArray
from ..exceptions import invalid

ShareInts = Callable[[list[int] | None], list[int]]
"""Given a list on rank 0 and None elsewhere, return rank 0's list on every rank."""


class GlobalOrder:
    """The indices of every epoch in the order in which all ranks together train on them.

    The sampler runs on rank 0 alone and once an epoch, as ranks that are seeded differently would
    draw different orders. A ``DistributedSampler`` is taken apart: its ``shuffle``, ``seed`` and
    epoch count, its sharding does not, so nothing is repeated to fill up ranks, and its
    ``drop_last``, which avoids just that, has nothing to drop.

    An order can be drawn again if the sampler draws from torch alone: the states of torch's
    generator and of the sampler's own are kept from before the draw. Of any other source of
    chance, a checksum tells whether the second draw was the same.

    Args:
        loader: the user's own; its data set has a length and is addressed by index.
        rank: who runs this.
        world_size: number of ranks.
        share: the broadcast from rank 0.

    Attributes:
        num_samples: indices in every epoch.
        fingerprint: checksum of the order drawn last; None before the first.

    Raises:
        ValueError: the loader cannot be given a global order; the message names the remedy.
    """

    def __init__(
        self, loader: DataLoader[Any], *, rank: int, world_size: int, share: ShareInts
    ) -> None:
        _check(loader, world_size)
        self._sampler: Iterable[Any] = loader.sampler
        self._is_root = rank == 0
        self._share = share
        self.num_samples = (
            len(self._sampler.dataset)  # type: ignore[arg-type]
            if isinstance(self._sampler, DistributedSampler)
            else len(self._sampler)  # type: ignore[arg-type]
        )
        self._before: list[int] = []
        self.fingerprint: int | None = None

    def draw(self) -> IntArray:
        """Draw the next epoch's order. Collective: every rank calls it.

        Raises:
            ValueError: the sampler yields what is no integer, or not as many as it says.
            RuntimeError: the sampler failed on rank 0.
        """
        return self._agree(_chance(self._sampler) if self._is_root else [])

    def redraw(self, before: list[int], fingerprint: int) -> IntArray:
        """Draw a past order again, from what ``state`` gave back then. Collective.

        Raises:
            RuntimeError: it is not the order of back then.
        """
        training = torch.get_rng_state()
        if self._is_root:
            _set_chance(self._sampler, before)
        try:
            order = self._agree(before)
        finally:
            # What the model draws goes on where it was; only the sampler's own has moved.
            torch.set_rng_state(training)
        if self.fingerprint != fingerprint:
            raise RuntimeError(
                "the sampler did not draw the order of the checkpoint again, so samples would be "
                "skipped and repeated. Give it a `torch.Generator` as its only source of chance, "
                "and the data set and seed of back then."
            )
        return order

    def state(self) -> list[int]:
        """Return what ``redraw`` takes, the same on every rank."""
        return self._before

    def _agree(self, before: list[int]) -> IntArray:
        """Run the sampler on rank 0 and return its order on all ranks."""
        order: list[int] | None = None
        problem: Exception | None = None
        if self._is_root:
            try:
                order = _indices(self._sampler, self.num_samples)
            except Exception as error:
                problem = error
        elif type(self._sampler) is RandomSampler and self._sampler.generator is None:
            # On rank 0 it seeds itself from torch's generator, which stays alike on all ranks.
            torch.empty((), dtype=torch.int64, device="cpu").random_()

        # The states go along so that any rank can write the checkpoint. Empty: the draw failed.
        self._before = (
            self._share([] if problem else before) if self._is_root else self._share(None)
        )
        if problem:
            raise problem
        if not self._before:
            raise RuntimeError("the sampler failed on rank 0; its error is raised there")
        agreed = np.array(self._share(order), np.int64)
        self.fingerprint = zlib.crc32(agreed.tobytes())
        return agreed


def _check(loader: DataLoader[Any], world_size: int) -> None:
    """Raise unless ``loader`` can be given a global order."""
    where = "BalancedLoader(loader=...)"
    if isinstance(loader.dataset, IterableDataset):
        raise invalid(
            where,
            "have a data set that is addressed by index",
            f"the IterableDataset {type(loader.dataset).__name__}",
            "Streams are not balanced yet: write a map-style `Dataset` with `__len__` and "
            "`__getitem__`, over the stream's files or record offsets, say.",
        )
    if loader.batch_size is None:
        got = "a custom batch_sampler" if loader.batch_sampler is not None else "batch_size=None"
        raise invalid(
            where,
            "leave it to evenstep which samples make a batch",
            got,
            "Use `DataLoader(batch_size=..., sampler=...)`.",
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise invalid(
            where,
            "be a DataLoader that iterates as torch's does",
            type(loader).__name__,
            "Give the DataLoader inside it, before another library prepared it.",
        )
    _check_sampler(loader.sampler, world_size)


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
    elif not hasattr(sampler, "__len__"):
        raise invalid(
            "DataLoader(sampler=...)",
            "have a length",
            type(sampler).__name__,
            "Give it a `__len__` that returns how many indices it yields an epoch.",
        )


def _indices(sampler: Iterable[Any], num_samples: int) -> list[int]:
    """Return all indices of one epoch as plain integers."""
    if isinstance(sampler, DistributedSampler):
        if not sampler.shuffle:
            return list(range(num_samples))
        generator = torch.Generator()
        generator.manual_seed(sampler.seed + sampler.epoch)  # as the sampler itself does
        return torch.randperm(num_samples, generator=generator, device="cpu").tolist()
    drawn = list(sampler)
    if len(drawn) != num_samples:
        raise invalid(
            "DataLoader(sampler=...)",
            f"yield as many indices as its length says, {num_samples}",
            len(drawn),
            "Make `__len__` and `__iter__` agree.",
        )
    try:
        return [operator.index(index) for index in drawn]
    except TypeError:
        raise invalid(
            "DataLoader(sampler=...)",
            "yield integers",
            repr(next(index for index in drawn if not hasattr(index, "__index__"))),
            "Let the data set look its keys up: `self.keys[index]`.",
        ) from None


def _chance(sampler: object) -> list[int]:
    """Return the sampler's epoch and the states of torch's generator and of its own."""
    states = [torch.get_rng_state()]
    if isinstance(own := getattr(sampler, "generator", None), torch.Generator):
        states.append(own.get_state())
    numbers = torch.cat(states).tolist()
    return [int(getattr(sampler, "epoch", 0)), len(states[0]), *numbers]


def _set_chance(sampler: object, written: list[int]) -> None:
    epoch, length, *numbers = written
    states = torch.tensor(numbers, dtype=torch.uint8, device="cpu")
    # Clones: torch 2.13 reads a state from where the storage begins, and a view's begins elsewhere.
    torch.set_rng_state(states[:length].clone())
    if isinstance(own := getattr(sampler, "generator", None), torch.Generator):
        own.set_state(states[length:].clone())
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
