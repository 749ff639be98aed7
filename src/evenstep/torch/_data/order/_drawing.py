"""The blocks of an order: how rank 0 draws them, and those that are drawn and still needed."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from ...._types import IntArray
from ....exceptions import invalid

_END = object()


class Chance:
    """What a sampler draws from torch, as if no other code drew between its blocks.

    A sampler may draw from torch's generator as it goes, and so does the model. The sampler goes
    on where its last block ended, so that a checkpoint needs only the states from before the
    first one; the model goes on where the model was. As long as the model draws nothing, both are
    one, as with torch's own loader. Once they have parted, the sampler's next epoch goes on from
    its last, and never repeats the numbers of that.

    Args:
        sampler: its ``generator``, if it has one, is treated likewise.
    """

    def __init__(self, sampler: object) -> None:
        self._sampler = sampler
        self._left: list[torch.Tensor] = []  # states after the newest block
        self._parted: set[int] = set()

    def written(self) -> list[int]:
        """Return the sampler's epoch and the states that its next epoch begins with."""
        states = self._states_before_epoch()
        numbers = torch.cat(states).tolist()
        return [int(getattr(self._sampler, "epoch", 0)), len(states[0]), *numbers]

    def restore(self, written: list[int]) -> None:
        """Have the next block be the first after the states in ``written``.

        What the model draws goes on where it was; only the sampler's own generator is set back.
        """
        epoch, length, *numbers = written
        states = torch.tensor(numbers, dtype=torch.uint8, device="cpu")
        # Clones: torch 2.13 reads a state from where the storage begins, and a view's begins
        # elsewhere.
        self._left = [states[:length].clone()]
        for own in self._generators()[1:]:
            self._left.append(states[length:].clone())
            own.set_state(self._left[1])
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)

    @contextmanager
    def block(self, *, begins: bool, again: bool = False) -> Iterator[None]:
        """Draw a block inside of it, the first of an epoch or a later one.

        With ``again`` the first begins with what was restored.
        """
        generators = self._generators()
        live = [generator.get_state() for generator in generators]
        before = self._states_before_epoch() if begins and not again else self._left
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)
        try:
            yield
        finally:
            self._left = [generator.get_state() for generator in generators]
            for number, generator in enumerate(generators):
                if torch.equal(before[number], live[number]):
                    continue
                generator.set_state(live[number])  # of the model, which has drawn meanwhile
                if not begins and not torch.equal(before[number], self._left[number]):
                    self._parted.add(number)

    def _states_before_epoch(self) -> list[torch.Tensor]:
        return [
            self._left[number] if number in self._parted else generator.get_state()
            for number, generator in enumerate(self._generators())
        ]

    def _generators(self) -> list[torch.Generator]:
        own = getattr(self._sampler, "generator", None)
        return [torch.default_generator, *([own] if isinstance(own, torch.Generator) else [])]


def blocks_of(sampler: Iterable[Any], num_samples: int, block_size: int) -> Iterator[IntArray]:
    """Yield the indices of one epoch, ``block_size`` at a time.

    A sampler that yields what is no integer, or not as many as it says, is a ValueError.
    """
    if isinstance(sampler, DistributedSampler):
        yield from _taken_apart(sampler, num_samples, block_size)
        return
    indices = iter(sampler)
    for first in range(0, num_samples, block_size):
        end = min(first + block_size, num_samples)
        drawn = list(islice(indices, end - first))
        if len(drawn) < end - first:
            raise _miscounted(sampler, num_samples, str(first + len(drawn)))
        # To its very end, as torch's loader does: some draw from their generator there.
        if end == num_samples and next(indices, _END) is not _END:
            raise _miscounted(sampler, num_samples, "more")
        yield _integers(drawn)


def _taken_apart(sampler: Any, num_samples: int, block_size: int) -> Iterator[IntArray]:
    """Yield what all shards of a ``DistributedSampler`` would, without repeats."""
    order: torch.Tensor | None = None
    if sampler.shuffle:
        generator = torch.Generator()
        generator.manual_seed(sampler.seed + sampler.epoch)  # as the sampler itself does
        order = torch.randperm(num_samples, generator=generator, device="cpu")
    for first in range(0, num_samples, block_size):
        end = min(first + block_size, num_samples)
        yield np.arange(first, end) if order is None else order[first:end].numpy().copy()


def _integers(drawn: list[Any]) -> IntArray:
    try:
        return np.array([operator.index(index) for index in drawn], np.int64)
    except TypeError:
        raise invalid(
            "DataLoader(sampler=...)",
            "yield integers",
            repr(next(index for index in drawn if not hasattr(index, "__index__"))),
            "Let the data set look its keys up: `self.keys[index]`.",
        ) from None


def _miscounted(sampler: object, num_samples: int, got: str) -> ValueError:
    if not hasattr(sampler, "__len__"):
        return invalid(
            "DataLoader(sampler=...)",
            "have a length, or go on for ever",
            f"{type(sampler).__name__} without one, which ended after {got}",
            "Give it a `__len__` that returns how many indices it yields an epoch.",
        )
    return invalid(
        "DataLoader(sampler=...)",
        f"yield as many indices as its length says, {num_samples}",
        got,
        "Make `__len__` and `__iter__` agree.",
    )


class OrderBlocks:
    """The part of an order that is drawn and not trained on: it grows and shrinks by blocks.

    One thread at a time appends; any may read meanwhile.

    Args:
        first: position of the first index to come.
        checksum: of the order before it.
    """

    def __init__(self, first: int = 0, checksum: int = 0) -> None:
        # Where the indices begin, they themselves, and checksums of the order up to where blocks
        # end. Replaced and never changed, so that reading needs no lock.
        self._part: tuple[int, IntArray, tuple[tuple[int, int], ...]]
        self._part = first, np.zeros(0, np.int64), ((first, checksum),)

    @property
    def end(self) -> int:
        """The position up to which the order is drawn."""
        return self._part[2][-1][0]

    def append(self, indices: IntArray, position: int) -> None:
        """Take in the indices that come next, and forget blocks that end before ``position``."""
        first, kept, ends = self._part
        end, checksum = ends[-1]
        begin = max((one for one, _ in ends if one < position), default=first)
        self._part = (
            begin,
            np.concatenate([kept[begin - first :], indices]),
            (
                *(one for one in ends if one[0] >= position),
                (end + len(indices), zlib.crc32(indices.tobytes(), checksum)),
            ),
        )

    def indices(self, first: int, num_samples: int) -> IntArray | None:
        """Return the indices from position ``first`` on; None if they are not drawn yet."""
        begin, indices, ends = self._part
        if first + num_samples > ends[-1][0]:
            return None
        assert first >= begin, "it was dropped"
        return indices[first - begin : first - begin + num_samples]

    def checksum(self, position: int) -> tuple[int, int]:
        """Return how much of the order is covered by the checksum of ``position``, and that.

        By whole blocks, at least up to ``position`` and one of them: the same on all ranks,
        however far ahead of it they have drawn.
        """
        ends = self._part[2]
        return next((one for one in ends if one[0] >= max(position, 1)), ends[-1])
