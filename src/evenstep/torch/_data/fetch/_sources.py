"""What a source of batches gives; and the one without workers, in the training process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from ...._types import IntArray
from .._protocols import MicroBatch
from ..deal._by_cost import Indices
from ..deal._plans import Share, StepSpan
from ._loader_workers import fetch, pinning, worker_generator

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


ShareOf = Callable[[StepSpan], Share | None]
"""A rank's part of a step under the newest plan, for any thread; None while there is none."""


def seeded(indices_of: Indices, keys: EpochKeys) -> Indices:
    """Return ``indices_of`` with the key of each position as the sample's seed: pairs of them."""

    def pairs(first: int, num_samples: int) -> IntArray | None:
        indices = indices_of(first, num_samples)
        if indices is None:
            return None
        return np.stack([indices, keys.at(first + np.arange(num_samples))], axis=1)

    return pairs


@dataclass(slots=True)
class FetchCounts:
    """How many samples a rank asked its data set for, and how many of them it trained on.

    What was asked for and not used is the price of fetching ahead while plans change.

    Attributes:
        requested: samples asked for.
        used: samples handed out, stand-ins of weight 0 included.
    """

    requested: int = 0
    used: int = 0


@dataclass(slots=True)
class Feed:
    """Samples of the step under way, beyond those it began with.

    Attributes:
        request: has samples on their way that are wanted soon; returns whether all are here.
        fetch_s: returns in how many seconds so many samples would be here.
        batch: returns a batch of samples, ascending, as soon as they are here.
    """

    request: Callable[[IntArray], bool]
    fetch_s: Callable[[int], float]
    batch: Callable[[IntArray], Any]


class InlineSource:
    """Fetches and collates when asked, as torch's loader does with ``num_workers=0``.

    Attributes:
        counts: of samples.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._batch_of = pinning(loader, loader.collate_fn)
        self._indices_of: Indices | None = None
        self._share_of: ShareOf | None = None
        self.counts = FetchCounts()

    def open(self) -> None:
        """Start what fetches, if it is not running, and draw its seed when torch's would."""
        worker_generator(self._loader)  # torch's loader draws it without workers too

    def begin(self, indices_of: Indices, spans: Iterator[StepSpan], share_of: ShareOf) -> None:
        """Get ready for these steps."""
        self._indices_of, self._share_of = indices_of, share_of

    def replan(self) -> None:
        """Do nothing: shares are asked for as late as can be."""

    def take(self, span: StepSpan) -> tuple[list[MicroBatch], Feed]:
        """Return the batches that a step begins with, which is the next one, and its others."""
        assert self._indices_of is not None
        assert self._share_of is not None
        share, indices = self._share_of(span), self._indices_of(span.first, span.num_samples)
        assert share is not None  # the plan of this step is in force
        assert indices is not None  # and its part of the order is drawn

        counts, parts = self.counts, []
        begun = fetch(self._loader.dataset, indices[share.begun].tolist())
        counts.requested += len(begun)
        counts.used += len(begun)
        for place, size in zip(share.places, share.forwards, strict=True):
            parts.append(MicroBatch(self._batch_of(begun[place]), size))
        return parts, Feed(  # further ones come as soon as they are asked for
            request=lambda slots: True,
            fetch_s=lambda num_samples: 0.0,
            batch=lambda slots: self._further(indices[slots].tolist()),
        )

    def _further(self, indices: list[Any]) -> Any:
        samples = fetch(self._loader.dataset, indices)
        self.counts.requested += len(samples)
        self.counts.used += len(samples)
        return self._batch_of(samples)

    def end(self) -> None:
        """Let go of the epoch, wherever it stands."""
        self._indices_of = self._share_of = None

    def close(self) -> None:
        """Stop everything, threads and processes; ``open`` starts afresh."""
        self.end()
