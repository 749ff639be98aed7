"""Indices that are drawn instead of read: for scripts that make their batches themselves."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from ...._types import IntArray
from ....exceptions import invalid

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
        _check("high", high is None or _is_integer(high, _MOST), high, "be from 1 to 2**48")
        _check("batch_size", _is_integer(batch_size, _MOST), batch_size, "be at least 1")
        super().__init__(
            _Indices(high),
            batch_size=batch_size,
            sampler=Draws(high, generator),
            collate_fn=_as_tensor,
        )


@final
class _Indices(Dataset[int]):
    """The data set whose samples are their indices."""

    def __init__(self, high: int | None) -> None:
        self._length = _ENDLESS if high is None else high

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


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


def _is_integer(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def _check(name: str, holds: bool, value: object, rule: str) -> None:
    if not holds:
        raise invalid(
            f"DrawnIndices({name}=...)",
            f"{rule}, as an integer",
            repr(value),
            "Give the number of samples that can be drawn, or None to count up."
            if name == "high"
            else "Give the batch size of a rank with an equal share.",
        )
