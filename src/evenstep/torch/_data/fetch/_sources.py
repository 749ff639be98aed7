"""What a source of batches is; and the one without workers, in the training process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import DataLoader

from ...._types import IntArray
from .._protocols import MicroBatch
from ..deal._plans import Share, StepSpan
from ._torch_loader import fetch, worker_generator

ShareOf = Callable[[StepSpan], Share | None]
"""A rank's part of a step under the newest plan, for any thread; None while there is none."""

IndicesOf = Callable[[int, int], IntArray | None]
"""So many indices of the order from a position on, for any thread; None while not drawn."""


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


class Feed(Protocol):
    """Samples of the step under way, beyond those it began with."""

    def request(self, slots: IntArray) -> bool:
        """Have samples on their way that are wanted soon; return whether all are here."""
        ...

    def fetch_s(self, num_samples: int) -> float:
        """Return in how many seconds so many samples would be here."""
        ...

    def batch(self, slots: IntArray) -> Any:
        """Return a batch of samples, ascending, as soon as they are here."""
        ...


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

    def __init__(self, loader: DataLoader[Any], *, pin: Callable[[Any], Any]) -> None:
        self._loader = loader
        self._pin = pin
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
        feed = InlineFeed(self._loader, indices, pin=self._pin, counts=self.counts)
        samples = feed.samples(share.begun())
        parts = [
            MicroBatch(feed.collated(part), size)
            for part, size in zip(deal_out(samples, share), share.forwards, strict=True)
        ]
        return parts, feed

    def end(self) -> None:
        self._indices_of = self._share_of = None

    def close(self) -> None:
        self.end()


class InlineFeed:
    """Fetches and collates samples of one step when asked.

    Args:
        loader: the user's.
        indices: what the slots of the step are in the data set.
        pin: moves a batch to pinned memory.
        counts: of what is fetched.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        indices: IntArray,
        *,
        pin: Callable[[Any], Any],
        counts: FetchCounts,
    ) -> None:
        self._loader = loader
        self._indices = indices
        self._pin = pin
        self._counts = counts

    def request(self, slots: IntArray) -> bool:
        return True  # they come as soon as they are asked for

    def fetch_s(self, num_samples: int) -> float:
        return 0.0

    def batch(self, slots: IntArray) -> Any:
        return self.collated(self.samples(slots))

    def samples(self, slots: IntArray) -> list[Any]:
        """Return samples, which count as used."""
        samples = fetch(self._loader.dataset, self._indices[slots].tolist())
        self._counts.requested += len(samples)
        self._counts.used += len(samples)
        return samples

    def collated(self, samples: list[Any]) -> Any:
        """Return the batch of samples."""
        return self._pin(self._loader.collate_fn(samples))


def deal_out(items: list[Any], share: Share) -> list[list[Any]]:
    """Return ``items``, one for each fetched slot, forward by forward."""
    parts, first = [], 0
    for size in share.forwards:
        parts.append(items[first : first + max(size, 1)])  # at least the stand-in
        first += size
    return parts
