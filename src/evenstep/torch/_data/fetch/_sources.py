"""What a source of batches is; and the one without workers, in the training process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch.utils.data import DataLoader

from ...._types import IntArray
from .._protocols import MicroBatch
from ..deal._plans import Share, StepSpan
from ..deal._sample_keys import EpochKeys
from ._torch_loader import fetch, pinning, worker_generator

ShareOf = Callable[[StepSpan], Share | None]
"""A rank's part of a step under the newest plan, for any thread; None while there is none."""

IndicesOf = Callable[[int, int], IntArray | None]
"""So many indices of the order from a position on, for any thread; None while not drawn.

Where samples have seeds, ``(num_samples, 2)``, with the seed of each.
"""


def seeded(indices_of: IndicesOf, keys: EpochKeys) -> IndicesOf:
    """Return ``indices_of`` with the keys of the positions as the samples' seeds."""

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


class BatchSource(Protocol):
    """Where the batches of an epoch come from."""

    counts: FetchCounts

    def open(self) -> None:
        """Start what fetches, if it is not running, and draw its seed when torch's would."""
        ...

    def begin(self, indices_of: IndicesOf, spans: Iterator[StepSpan], share_of: ShareOf) -> None:
        """Get ready for these steps."""
        ...

    def replan(self) -> None:
        """Fetch by the newest shares of the steps ahead: they may have changed."""
        ...

    def take(self, span: StepSpan) -> tuple[list[MicroBatch], Feed]:
        """Return the batches that a step begins with, which is the next one, and its others."""
        ...

    def end(self) -> None:
        """Let go of the epoch, wherever it stands."""
        ...

    def close(self) -> None:
        """Stop everything, threads and processes; ``open`` starts afresh."""
        ...


class InlineSource:
    """Fetches and collates when asked, as torch's loader does with ``num_workers=0``."""

    def __init__(self, loader: DataLoader[Any], *, pin: Callable[[Any], Any] | None) -> None:
        self._loader = loader
        self._batch_of = pinning(loader.collate_fn, pin)
        self._indices_of: IndicesOf | None = None
        self._share_of: ShareOf | None = None
        self.counts = FetchCounts()

    def open(self) -> None:
        worker_generator(self._loader)  # torch's loader draws it without workers too

    def begin(self, indices_of: IndicesOf, spans: Iterator[StepSpan], share_of: ShareOf) -> None:
        self._indices_of, self._share_of = indices_of, share_of

    def replan(self) -> None: ...

    def take(self, span: StepSpan) -> tuple[list[MicroBatch], Feed]:
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
        self._indices_of = self._share_of = None

    def close(self) -> None:
        self.end()
