"""Where batches come from: this process, or workers that fetch ahead of the newest plan."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from threading import Condition, Thread, current_thread
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from ...._types import IntArray
from .._protocols import MicroBatch
from ..deal._by_cost import Indices
from ..deal._plans import Share, StepSpan
from ._chunks import ChunkRows, Packed, SamplePlace, batch_of, chunk_merge, rows_of
from ._loader_workers import Wanted, WorkerPool, fetch, pinning, worker_generator

# SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
STEP = 0x9E3779B97F4A7C15
FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_BITS = (1 << 64) - 1


KeysOf = Callable[[IntArray], IntArray]
"""The keys of positions in the order of one epoch, in any shape."""


def epoch_keys(seed: int, loader: int, epoch: int) -> KeysOf:
    """Return the keys of an epoch, counted from 1, of a loader, counted from 0."""
    start = np.array([seed & _BITS], np.uint64)
    for number in (loader, epoch):
        start = mixed(start) + np.uint64(number)
    first = mixed(start)[0]
    return lambda at: mixed(first + at.astype(np.uint64) * np.uint64(STEP)).view(np.int64)


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


def seeded(indices_of: Indices, keys_of: KeysOf) -> Indices:
    """Return ``indices_of`` with the key of each position as the sample's seed: pairs of them."""

    def pairs(first: int, num_samples: int) -> IntArray | None:
        indices = indices_of(first, num_samples)
        if indices is None:
            return None
        return np.stack([indices, keys_of(first + np.arange(num_samples))], axis=1)

    return pairs


class InlineSource:
    """Fetches and collates when asked, as torch's loader does with ``num_workers=0``."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._batch_of = pinning(loader, loader.collate_fn)
        self._indices_of: Indices | None = None
        self._share_of: ShareOf | None = None

    def open(self) -> None:
        """Start what fetches, if it is not running, and draw its seed when torch's would."""
        worker_generator(self._loader)  # torch's loader draws it without workers too

    def begin(self, indices_of: Indices, spans: Iterator[StepSpan], share_of: ShareOf) -> None:
        """Get ready for these steps."""
        self._indices_of, self._share_of = indices_of, share_of

    def replan(self) -> None:
        """Do nothing: shares are asked for as late as can be."""

    def take(self, span: StepSpan) -> tuple[list[MicroBatch], IntArray]:
        """Return the batches that a step begins with, which is the next one, and its indices."""
        assert self._indices_of is not None
        assert self._share_of is not None
        share, indices = self._share_of(span), self._indices_of(span.first, span.num_samples)
        assert share is not None  # the plan of this step is in force
        assert indices is not None  # and its part of the order is drawn

        begun, parts = fetch(self._loader.dataset, indices[share.begun].tolist()), []
        for place, size in zip(share.places, share.forwards, strict=True):
            parts.append(MicroBatch(self._batch_of(begun[place]), size))
        return parts, indices

    def request(self, indices: IntArray, slots: IntArray) -> bool:
        """Return that samples come as soon as they are asked for."""
        return True

    def fetch_s(self, num_samples: int) -> float:
        """Return that fetching ahead takes no time: nothing is."""
        return 0.0

    def batch(self, indices: IntArray, slots: IntArray) -> Any:
        """Return a batch of further samples of a step with these indices."""
        return self._batch_of(fetch(self._loader.dataset, indices[slots].tolist()))

    def end(self) -> None:
        """Let go of the epoch, wherever it stands."""
        self._indices_of = self._share_of = None

    def close(self) -> None:
        """Stop everything, threads and processes; ``open`` starts afresh."""
        self.end()


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
        self.todo = share.fetched  # that was not asked for yet

    def replan(self, share: Share) -> None:
        """Take over a newer plan's share."""
        if not share.equals(self.share):
            self.share = share
            slots = share.fetched
            self.todo = slots[~self._asked[slots]]

    def indices(self, slots: IntArray) -> Wanted:
        """Return what these slots are in the data set."""
        wanted: Wanted = self._indices[slots].tolist()
        return wanted

    def ask(self, most: int) -> IntArray:
        """Return the first ``most`` slots to ask for, which counts as having asked."""
        slots, self.todo = self.todo[:most], self.todo[most:]
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

    def want(self, slots: IntArray) -> IntArray:
        """Return which of these slots were not asked for yet, which counts as having asked."""
        missing = slots[~self._asked[slots]]
        self._asked[missing] = True
        self.todo = np.setdiff1d(self.todo, missing)
        return missing

    def rows_of(self, slots: IntArray) -> list[ChunkRows]:
        """Return where the samples of these slots lie, all of which are here."""
        return rows_of(place for slot in slots.tolist() if (place := self._place[slot]) is not None)


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
        self._indices_of: Indices | None = None
        self.works: deque[StepWork] = deque()

    def begin(self, spans: Iterable[StepSpan], indices_of: Indices | None = None) -> None:
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
            if num_todo := len(work.todo):
                return work, work.ask(self._chunk_size(num_todo))
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


_LOOK_S = 0.5  # between two checks that the run can continue


class PrefetchSource:
    """Samples by the loader workers, batches by a thread.

    Workers are asked for what this rank owns under the newest plan, the nearest step first, and
    for no more than two chunks each at a time, so what a new plan adds is on its way within
    milliseconds. The batch of the next step is made in the background under the plan then in
    force, and made again if that changes; its samples are in the order of their positions, so the
    same plans give the same batches.

    Three threads meet here, all under ``changed``: the training thread (all public methods), the
    one that receives chunks, and the one that makes batches. ``replan`` may come from any.

    Args:
        loader: the user's, with at least one worker.
        changed: guards the plans and all state here.
        check: raises if the run cannot continue.
    """

    def __init__(
        self, loader: DataLoader[Any], changed: Condition, check: Callable[[], None]
    ) -> None:
        assert loader.prefetch_factor is not None  # torch fills it in where there are workers
        self._loader = loader
        self._changed = changed
        self._check = check
        self._merge = chunk_merge(loader.collate_fn)
        self._batch_of = pinning(loader, partial(batch_of, loader.collate_fn, self._merge))
        self._horizon = Horizon(
            num_steps=max(2, loader.num_workers * loader.prefetch_factor),
            num_workers=loader.num_workers,
        )
        self.fetch_s = self._horizon.fetch_s
        self._pool: WorkerPool[tuple[StepWork, IntArray]] | None = None
        self._maker: Thread | None = None
        self._share_of: ShareOf | None = None
        self._problem: Exception | None = None
        self._closing = self._is_behind = False

    def open(self) -> None:
        """Start what fetches, if it is not running, and draw its seed when torch's would."""
        if self._pool is not None:
            return
        self._closing, self._problem = False, None
        self._pool = WorkerPool(
            self._loader,
            worker_generator(self._loader),
            merge=self._merge,
            deliver=self._deliver,
            fail=self._fail,
        )
        self._maker = Thread(target=self._make_batches, name="evenstep-collate", daemon=True)
        self._maker.start()

    def begin(self, indices_of: Indices, spans: Iterator[StepSpan], share_of: ShareOf) -> None:
        """Get ready for these steps."""
        with self._changed:
            self._share_of = share_of
            self._horizon.begin(spans, indices_of)
            self.replan()

    def replan(self) -> None:
        """Fetch by the newest shares of the steps ahead: they may have changed."""
        with self._changed:
            self._is_behind = False
            if self._share_of is not None:
                self._horizon.replan(self._share_of)
                self._ask()
                self._changed.notify_all()

    def take(self, span: StepSpan) -> tuple[list[MicroBatch], StepWork]:
        """Return the batches that a step begins with, which is the next one, and its work."""
        with self._changed:
            works = self._horizon.works
            if not works:
                self.replan()
            work = works[0]
            assert work.span == span
            if not work.is_made():
                self._wait_until(work.is_made)
            assert work.made is not None
            made = work.made[1]
            works.popleft()
            work.handed_out = self._is_behind = True  # the next one comes into sight
            self._changed.notify_all()
        if isinstance(made, Exception):
            raise made
        return made, work

    def request(self, work: StepWork, slots: IntArray) -> bool:
        """Ask for samples of a step under way, before all others; return whether all are here."""
        with self._changed:
            missing = work.want(slots)
            if self._pool is None or self._share_of is None:
                return False
            for part in np.array_split(missing, min(len(missing), self._loader.num_workers) or 1):
                if len(part):
                    self._pool.send(work.indices(part), (work, part))
            return work.has(slots)

    def batch(self, work: StepWork, slots: IntArray) -> Any:
        """Return a batch of samples of a step under way, as soon as they are here."""
        self.request(work, slots)
        with self._changed:
            self._wait_until(lambda: work.has(slots))
            rows = work.rows_of(slots)
        return self._batch_of(rows)

    def end(self) -> None:
        """Let go of the epoch, wherever it stands."""
        self._look_no_further()
        if not self._loader.persistent_workers or self._problem is not None:
            self.close()

    def close(self) -> None:
        """Stop everything, threads and processes; ``open`` starts afresh."""
        self._closing = True
        self._look_no_further()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
        maker, self._maker = self._maker, None
        # A forgotten loader is closed where it is collected, which may be in that very thread.
        if maker is not None and maker is not current_thread():
            maker.join()

    def _look_no_further(self) -> None:
        with self._changed:
            self._horizon.begin([])
            self._share_of = None
            self._changed.notify_all()

    def _wait_until(self, is_done: Callable[[], bool]) -> None:
        """Wait for what workers and threads are at, as long as the user's loader and run would."""
        limit_s = self._loader.timeout  # 0 is none
        deadline_s = monotonic() + (limit_s or math.inf)
        while not is_done():
            if self._problem is not None:
                raise self._problem
            if self._pool is None:
                raise RuntimeError("the loader was closed, so no worker fetches for this step")
            left_s = deadline_s - monotonic()
            if left_s <= 0:
                raise RuntimeError(f"DataLoader timed out after {limit_s} seconds")
            if not self._changed.wait(min(left_s, _LOOK_S)):
                self._check()

    def _ask(self) -> None:
        """Give workers with room the most urgent tasks there are."""
        if self._pool is None or self._closing:
            return
        while self._pool.has_room() and (wanted := self._horizon.ask()) is not None:
            work, slots = wanted
            self._pool.send(work.indices(slots), wanted)

    def _deliver(self, asked: tuple[StepWork, IntArray], content: Packed, fetch_s: float) -> None:
        if content.num_shared:
            with self._changed:
                is_crowded = self._horizon.is_crowded()
            content = content.local() if is_crowded else content
        with self._changed:
            if self._pool is None:  # closed meanwhile
                return
            work, slots = asked
            self._horizon.learn(len(slots), fetch_s)
            work.store(slots, content)
            self._ask()
            works = self._horizon.works
            is_next = bool(works) and work is works[0] and work.is_complete()
            if is_next or work.handed_out:
                self._changed.notify_all()

    def _fail(self, problem: Exception) -> None:
        with self._changed:
            self._problem = self._problem or problem
            self._changed.notify_all()

    def _make_batches(self) -> None:
        while self._make_next():
            pass  # a frame of its own keeps no batch while there is no work

    def _is_due(self) -> bool:
        """Return whether the next step's batches can be made, and are not."""
        works = self._horizon.works
        return bool(works) and works[0].is_complete() and not works[0].is_made()

    def _make_next(self) -> bool:
        """Make the next step's batches as soon as they can be; return False where that is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._is_behind or self._is_due())
            if self._closing:
                return False
            if self._is_behind:
                self.replan()
                return True
            work = self._horizon.works[0]
            share = work.share
            rows = [work.rows_of(slots) for slots in share.of_forwards()]
        made: list[MicroBatch] | Exception
        try:
            made = [
                MicroBatch(self._batch_of(part), size)
                for part, size in zip(rows, share.forwards, strict=True)
            ]
        except Exception as error:
            made = error
        with self._changed:
            work.made = share, made
            self._changed.notify_all()
        return True


BatchSource = InlineSource | PrefetchSource
"""Where the batches of an epoch come from."""
