"""Numbers that follow from a sample's place in the run alone: what it draws at random from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from ...._types import IntArray

# SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
STEP = 0x9E3779B97F4A7C15
FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_BITS = (1 << 64) - 1


@final
@dataclass(frozen=True, slots=True)
class EpochKeys:
    """The key of every position in the order of one epoch.

    Attributes:
        start: follows from the run's seed, the loader and the epoch.
    """

    start: int

    @classmethod
    def of_epoch(cls, seed: int, loader: int, epoch: int) -> EpochKeys:
        """Return those of an epoch, counted from 1, of a loader, counted from 0."""
        start = np.array([seed & _BITS], np.uint64)
        for number in (loader, epoch):
            start = mixed(start) + np.uint64(number)
        return cls(int(mixed(start)[0]))

    def at(self, positions: IntArray) -> IntArray:
        """Return the keys of ``positions``, in any shape."""
        steps = np.asarray(positions).astype(np.uint64) * np.uint64(STEP)
        return mixed(np.uint64(self.start) + steps).view(np.int64)


def mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a number for each of ``numbers``, of which all bits depend on all of its bits."""
    numbers = numbers + np.uint64(STEP)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(FACTORS[0])
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(FACTORS[1])
    return numbers ^ (numbers >> np.uint64(31))


def drawn_rows(keys: IntArray, first: int, num_draws: int) -> IntArray:
    """Return where rows begin to draw, ``(num_draws, len(keys))``.

    Args:
        keys: of the rows' samples.
        first: number of the first draw.
        num_draws: how many draws.
    """
    draws = np.arange(first + 1, first + 1 + num_draws, dtype=np.uint64)
    salts = mixed(draws)[:, None]  # 0 is the samples' own, for their augmentation
    return mixed(keys.view(np.uint64)[None, :] ^ salts).view(np.int64)
