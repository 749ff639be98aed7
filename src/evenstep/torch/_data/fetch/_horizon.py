"""Which samples of the next steps are here, requested or missing; no threads, no processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ...._types import IntArray
from .._protocols import MicroBatch
from ..deal._plans import Share, StepSpan
from ._chunks import ChunkRows, Packed, SamplePlace, rows_of
from ._sources import IndicesOf, ShareOf
from ._torch_loader import Wanted

_LARGEST_CHUNK = 64
_CHUNK_S = 0.0075  # one that is under way delays an urgent one by this much
# Of small chunks a horizon holds hundreds, and a process may have 1024 descriptors in all.
_MOST_SHARED = 64


class StepWork:
    """One step ahead: its samples that this rank owns, or owned when they were asked for.

    What was fetched is kept until the step is over: a plan that swings back finds it there.
    """

    def __init__(self, span: StepSpan, share: Share, indices: IntArray) -> None:
        self.span = span
        self.share = share
        self._indices = indices  # of all its slots in the data set
        self.made: tuple[Share, list[MicroBatch] | Exception] | None = None
        self.num_shared = 0
        self.handed_out = False  # more of it may be claimed
        self._asked = np.zeros(span.num_samples, np.bool_)
        self._here = np.zeros(span.num_samples, np.bool_)
        self._place: list[SamplePlace | None] = [None] * span.num_samples
        self._todo = share.fetched

    def replan(self, share: Share) -> None:
        """Take over a newer plan's share."""
        if not share.equals(self.share):
            self.share = share
            slots = share.fetched
            self._todo = slots[~self._asked[slots]]

    @property
    def num_todo(self) -> int:
        """Samples it owns that were not asked for yet."""
        return len(self._todo)

    def indices(self, slots: IntArray) -> Wanted:
        """Return what these slots are in the data set."""
        wanted: Wanted = self._indices[slots].tolist()
        return wanted

    def ask(self, most: int) -> IntArray:
        """Return the first ``most`` slots to ask for, which counts as having asked."""
        slots, self._todo = self._todo[:most], self._todo[most:]
        self._asked[slots] = True
        return slots

    def store(self, slots: IntArray, chunk: Packed) -> None:
        """Take in a chunk that holds the samples of ``slots``, in this order."""
        self.num_shared += chunk.num_shared
        self._here[slots] = True
        for row, slot in enumerate(slots.tolist()):
            self._place[slot] = chunk, row

    def has(self, slots: IntArray) -> bool:
        """Return whether the samples of these slots are here."""
        return bool(self._here[slots].all())

    def is_complete(self) -> bool:
        """Return whether every sample it owns is here."""
        return self.has(self.share.fetched)

    def is_made(self) -> bool:
        """Return whether its batches are made, of the very samples it owns."""
        return self.made is not None and self.made[0].equals(self.share)

    def rows(self) -> list[list[ChunkRows]]:
        """Return where the samples of each of its forwards lie, in their order."""
        slots = self.share.fetched.tolist()
        return [self.rows_of(slots[place]) for place in self.share.places]

    def want(self, slots: IntArray) -> IntArray:
        """Return which of these slots were not asked for yet, which counts as having asked."""
        missing = slots[~self._asked[slots]]
        self._asked[missing] = True
        self._todo = np.setdiff1d(self._todo, missing)
        return missing

    def rows_of(self, slots: Sequence[int]) -> list[ChunkRows]:
        """Return where the samples of these slots lie, all of which are here."""
        return rows_of(place for slot in slots if (place := self._place[slot]) is not None)


class Horizon:
    """The next steps, as far ahead as torch's loader would prefetch, and what to fetch of them.

    Attributes:
        works: those that come next and have a plan, the next one first.
    """

    def __init__(self, *, num_steps: int, num_workers: int) -> None:
        self._num_steps = num_steps
        self._num_workers = num_workers
        self._sample_s: float | None = None
        self._spans: Iterator[StepSpan] = iter(())
        self._next: StepSpan | None = None
        self._indices_of: IndicesOf | None = None
        self.works: deque[StepWork] = deque()

    def begin(self, spans: Iterable[StepSpan], indices_of: IndicesOf | None = None) -> None:
        """Start over with these steps; none is to end."""
        self._spans, self._indices_of = iter(spans), indices_of
        self._next = next(self._spans, None)
        self.works.clear()

    def replan(self, share_of: ShareOf) -> None:
        """Bring every step to the newest plan, and those into sight that come next."""
        for work in self.works:
            share = share_of(work.span)
            assert share is not None
            work.replan(share)
        while (span := self._next) is not None and len(self.works) < self._num_steps:
            assert self._indices_of is not None
            share, indices = share_of(span), self._indices_of(span.first, span.num_samples)
            if share is None or indices is None:
                return
            self.works.append(StepWork(span, share, indices))
            self._next = next(self._spans, None)

    def ask(self) -> tuple[StepWork, IntArray] | None:
        """Return what to fetch next, of the nearest step that lacks anything; None if none does.

        As many samples as take some milliseconds, and of a step's last ones no more than leave
        something for every worker.
        """
        for work in self.works:
            if work.num_todo:
                return work, work.ask(self._chunk_size(work.num_todo))
        return None

    def is_crowded(self) -> bool:
        """Return whether as much is in shared memory as should be at a time."""
        return sum(work.num_shared for work in self.works) >= _MOST_SHARED

    def learn(self, num_samples: int, fetch_s: float) -> None:
        """Take note of what a chunk took."""
        sample_s = max(fetch_s / num_samples, 1e-9)
        old_s = sample_s if self._sample_s is None else self._sample_s
        self._sample_s = 0.8 * old_s + 0.2 * sample_s

    def fetch_s(self, num_samples: int) -> float:
        """Return in how many seconds workers would fetch so many, behind a chunk under way."""
        return _CHUNK_S + num_samples * (self._sample_s or 0.0) / self._num_workers

    def _chunk_size(self, num_todo: int) -> int:
        if self._sample_s is None:
            return 1
        fair = -(-num_todo // self._num_workers)
        quick = round(_CHUNK_S / 5 / self._sample_s)  # too short to be worth sharing out
        size = min(round(_CHUNK_S / self._sample_s), max(fair, quick))
        return min(max(size, 1), _LARGEST_CHUNK)
