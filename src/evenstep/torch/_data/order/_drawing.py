"""Samplers that can give one order for all ranks, and its blocks: drawn by rank 0, or by a seed."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, final

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
)

from ...._types import IntArray
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
    """Return the length of a data set, a sampler or a loader, where it knows one."""
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


_PIECE = 4096  # indices of one random stream, so that any position is reached at once
_MOST = 1 << 48  # beyond, numbers of 64 bits are not spread evenly enough
_ENDLESS = 1 << 62


class DrawnIndices(DataLoader[Any]):
    r"""An endless loader whose batches are int64 tensors of indices, ``(batch_size,)``.

    For scripts that draw their batches themselves, such as nanoGPT, and for generated data, such
    as rollouts. ``Balancer.prepare`` takes it like any other loader. Step $k$ has draws
    $[kB, (k+1)B)$ of one sequence, and each rank gets as many of them as the plan says. A
    checkpoint continues at the next draw, on any number of ranks, without repeating earlier draws.

    Draw $p$ is $x_p \bmod \mathrm{high}$, where $x_p$ is the $p$-th number of 64 bits from Philox
    generators that are keyed by a seed. The seed is drawn at the beginning of each loop, on rank
    0, from ``generator``.

    Usage:
        model, draws = balancer.prepare(model, DrawnIndices(len(tokens) - block_size, 12))
        for indices in draws:  # or `next(iterator)` when a batch is needed
            x = torch.stack([tokens[i : i + block_size] for i in indices])

    Right where samples are drawn independently of each other, with replacement. To see each sample
    once in an epoch, use ``DataLoader(dataset, shuffle=True)``.

    Args:
        high: indices are from 0 to ``high - 1``, all equally likely; from 1 to 2**48. None counts
            up from 0 without end, so that each number comes once: for generated data, where a
            number can be the seed of a sample.
        batch_size: indices per step of a rank with an equal share, as in
            ``DataLoader(batch_size=...)``.
        generator: the torch generator that draws the seed; None is torch's default.

    Raises:
        ValueError: ``high`` or ``batch_size`` is out of range.
    """

    def __init__(
        self, high: int | None, batch_size: int, *, generator: torch.Generator | None = None
    ) -> None:
        if high is not None:
            remedy = "Give the number of samples that can be drawn, or None to count up."
            _check("high", high, "be from 1 to 2**48", remedy)
        remedy = "Give the batch size of a rank with an equal share."
        _check("batch_size", batch_size, "be at least 1", remedy)
        super().__init__(
            range(_ENDLESS if high is None else high),  # type: ignore[arg-type]
            batch_size=batch_size,
            sampler=Draws(high, generator),
            collate_fn=_as_tensor,
        )


@final
class Draws(Sampler[int]):
    """A sampler without end whose sequence can begin at any position.

    Args:
        high: as in ``DrawnIndices``.
        generator: of the seed.
    """

    def __init__(self, high: int | None, generator: torch.Generator | None) -> None:
        self.generator = generator
        self._high = high

    def draw(self) -> DrawnOrder:
        """Return the sequence of a seed that is drawn now."""
        seed = torch.empty((), dtype=torch.int64, device="cpu").random_(generator=self.generator)
        return DrawnOrder(self._high, int(seed))

    def __iter__(self) -> Iterator[int]:
        for block in self.draw().blocks(0, _PIECE):
            yield from block.tolist()


@final
@dataclass(frozen=True, slots=True)
class DrawnOrder:
    """One endless sequence of indices.

    Attributes:
        high: as in ``DrawnIndices``.
        seed: from 0 to 2**63 - 1.
    """

    high: int | None
    seed: int

    @property
    def key(self) -> int:
        """A checksum by which two sequences are the same."""
        return zlib.crc32(repr((self.high, self.seed)).encode())

    def blocks(self, position: int, block_size: int) -> Iterator[IntArray]:
        """Yield the indices from ``position`` on, ``block_size`` at a time, without end."""
        while True:
            yield self.at(position, block_size)
            position += block_size

    def at(self, position: int, num_indices: int) -> IntArray:
        """Return the indices from ``position`` on, ``(num_indices,)``."""
        end = position + num_indices
        if self.high is None:
            return np.arange(position, end, dtype=np.int64)
        first = position // _PIECE
        pieces = [self._piece(number) for number in range(first, -(-end // _PIECE))]
        return np.concatenate(pieces)[position - first * _PIECE :][:num_indices]

    def _piece(self, number: int) -> IntArray:
        assert self.high is not None
        raw = np.random.Philox(key=np.array([self.seed, number], np.uint64)).random_raw(_PIECE)
        # An index is at most high / 2**64 likelier than another: 2**64 is no multiple of `high`.
        return (raw % np.uint64(self.high)).astype(np.int64)


def _as_tensor(indices: list[int]) -> torch.Tensor:
    return torch.tensor(indices, dtype=torch.int64)


def _check(name: str, value: object, rule: str, remedy: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST:
        where = f"DrawnIndices({name}=...)"
        raise invalid(where, f"{rule}, as an integer", repr(value), remedy)


_END = object()


class Chance:
    """What a sampler draws from torch, as if no other code drew between its blocks.

    A sampler may draw from torch's generator as it goes, and so does the model. The sampler
    continues where its last block ended, so that a checkpoint needs only the states from before
    the first one; the model continues where the model was. As long as the model draws nothing,
    both are one, as with torch's own loader. Once they have parted, the sampler's next epoch
    continues from its last, and never repeats the numbers of that.

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

        What the model draws continues where it was; only the sampler's own generator is set back.
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
        yield integers(drawn)


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


def integers(drawn: list[Any]) -> IntArray:
    """Return the indices of a sampler as an array, or raise for what is none."""
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
