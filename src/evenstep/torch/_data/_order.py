"""One order of the whole data set for each epoch, drawn on rank 0 by the user's own sampler."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler

from ..._types import IntArray
from ...exceptions import invalid
from ._global_batches import GlobalBatches, has_own_batches

ShareInts = Callable[[list[int] | None], list[int]]
"""Given a list on rank 0 and None elsewhere, return rank 0's list on every rank."""


class GlobalOrder:
    """The indices of every epoch in the order in which all ranks together train on them.

    The sampler runs on rank 0 alone and once an epoch, as ranks that are seeded differently would
    draw different orders. A ``DistributedSampler`` is taken apart: its ``shuffle``, ``seed`` and
    epoch count, its sharding does not, so nothing is repeated to fill up ranks, and its
    ``drop_last``, which avoids just that, has nothing to drop. A ``batch_sampler`` is taken for
    one of global batches.

    An order can be drawn again if the sampler draws from torch alone: the states of torch's
    generator and of the sampler's own are kept from before the draw. Of any other source of
    chance, a checksum tells whether the second draw was the same.

    Args:
        loader: the user's own; its data set has a length and is addressed by index.
        rank: who runs this.
        world_size: number of ranks.
        share: the broadcast from rank 0.
        global_batch_size: samples of a step; None is to refuse a ``batch_sampler``.

    Attributes:
        sampler: what yields the order.
        num_samples: indices in every epoch.
        fingerprint: checksum of the order drawn last; None before the first.

    Raises:
        ValueError: the loader cannot be given a global order; the message names the remedy.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        rank: int,
        world_size: int,
        share: ShareInts,
        global_batch_size: int | None = None,
    ) -> None:
        _check(loader, world_size, batches=global_batch_size is not None)
        self.sampler: Iterable[Any] = loader.sampler
        if global_batch_size is not None and has_own_batches(loader):
            self.sampler = GlobalBatches(loader.batch_sampler, global_batch_size)  # type: ignore[arg-type]
        self._is_root = rank == 0
        self._share = share
        self.num_samples = (
            len(self.sampler.dataset)  # type: ignore[arg-type]
            if isinstance(self.sampler, DistributedSampler)
            else len(self.sampler)  # type: ignore[arg-type]
        )
        self._before: list[int] = []
        self.fingerprint: int | None = None

    def draw(self) -> IntArray:
        """Draw the next epoch's order. Collective: every rank calls it.

        Raises:
            ValueError: the sampler yields what is no integer, or not as many as it says.
            RuntimeError: the sampler failed on rank 0.
        """
        return self._agree(_chance(self.sampler) if self._is_root else [])

    def redraw(self, before: list[int], fingerprint: int, *, finished: bool = False) -> IntArray:
        """Draw a past order again, from what ``state`` gave back then. Collective.

        Args:
            before: from ``state``.
            fingerprint: checksum of the order.
            finished: whether the next one is drawn right after. That is of the epoch which the
                sampler has been told, unless it counts epochs itself.

        Raises:
            RuntimeError: it is not the order of back then.
        """
        training = torch.get_rng_state()
        told = getattr(self.sampler, "epoch", None)
        if self._is_root:
            _set_chance(self.sampler, before)
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
        counts = getattr(self.sampler, "epoch", None) != before[0]
        may_tell = told is not None and hasattr(self.sampler, "set_epoch")
        if finished and self._is_root and may_tell and not counts:
            self.sampler.set_epoch(told)  # type: ignore[attr-defined]
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
                order = _indices(self.sampler, self.num_samples)
            except Exception as error:
                problem = error
        elif _draws_a_seed(self.sampler):
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


def num_steps_of(num_samples: int, global_batch_size: int, drop_last: bool) -> int:
    """Return the steps of an epoch, of which there has to be one."""
    full, rest = divmod(num_samples, global_batch_size)
    num_steps = full + (rest > 0 and not drop_last)
    if num_steps == 0:
        least = global_batch_size if drop_last else 1
        raise invalid(
            "BalancedLoader(loader=...)",
            f"yield at least {least} samples an epoch",
            num_samples,
            "Lower the global batch size, or set `DataLoader(drop_last=False)`."
            if num_samples
            else "Give it a data set that is not empty.",
        )
    return num_steps


def _draws_a_seed(sampler: object) -> bool:
    """Tell whether a sampler takes one number from torch's generator in every epoch."""
    inner = sampler.sampler if isinstance(sampler, GlobalBatches) else sampler
    return type(inner) is RandomSampler and inner.generator is None


def _check(loader: DataLoader[Any], world_size: int, *, batches: bool) -> None:
    """Raise unless ``loader`` can be given a global order.

    Args:
        loader: the user's.
        world_size: number of ranks.
        batches: whether it may have a ``batch_sampler``.
    """
    where = "BalancedLoader(loader=...)"
    if isinstance(loader.dataset, IterableDataset):
        raise invalid(
            where,
            "have a data set that is addressed by index",
            f"the IterableDataset {type(loader.dataset).__name__}",
            "Prepare it with `balancer.prepare(model, loader, stream=...)`, which says what each "
            "rank reads of it.",
        )
    if loader.batch_size is None and not (batches and has_own_batches(loader)):
        got = "a custom batch_sampler" if has_own_batches(loader) else "batch_size=None"
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
