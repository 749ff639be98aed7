"""Which samples of a step are whose by what they cost, and lengths that are seen in training."""

from __future__ import annotations

import base64
import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from threading import Thread
from typing import final

import numpy as np

from ...._planner import UNKNOWN, Plan, SampleCosts, Work, assign, of_lengths
from ...._types import IntArray
from ....exceptions import invalid
from ....solve import Assignment, WorkerCosts
from .._protocols import LoaderRanks

_LOGGER = logging.getLogger("evenstep")
_KEPT = 256  # assignments: more steps than loaders fetch ahead
_LARGE = 1 << 13  # samples times ranks, from which on an assignment takes a millisecond or more

Key = tuple[int, int]
"""A plan's number, and a step's first position."""

Indices = Callable[[int, int], IntArray | None]
"""So many indices of the order from a position on, for any thread; None while not drawn."""


Assigned = tuple[Work, int, tuple[IntArray, ...]]
"""What a rank reports of its samples of a step by cost.

What they cost, and would have cost otherwise. A checksum of who has what by cost, or of the plan
where samples are counted: all ranks have it in common. And what each sample adds to the size of its
forward, forward by forward.
"""


@final
class CostDeal:
    """Assigns the samples of steps by cost, and sums up what a rank computes.

    Args:
        costs: of the samples.
        rank: this process.
        world_size: number of workers.
    """

    def __init__(self, costs: SampleCosts, *, rank: int, world_size: int) -> None:
        self._costs = costs
        self._rank = rank
        self._world_size = world_size
        self._indices_of: Indices = lambda first, num_samples: None
        self._equal_forwards = self._whole = self._has_warned = False
        self._known: dict[Key, Assignment] = {}
        self._under_way: dict[Key, Thread] = {}

    def begin(self, indices_of: Indices, *, equal_forwards: bool, whole: bool = False) -> None:
        """Assign the steps of another order from now on.

        Args:
            indices_of: its indices in the data set.
            equal_forwards: whether all ranks make as many forwards, where samples suffice.
            whole: whether every rank has a single one.
        """
        self._indices_of, self._equal_forwards, self._whole = indices_of, equal_forwards, whole
        self._known, self._under_way = {}, {}

    def parts(self, plan: Plan, first: int, num_samples: int) -> tuple[IntArray, ...] | None:
        """Return the slots of each of this rank's forwards; None while they are not drawn."""
        found = self._assignment(plan, first, num_samples)
        return None if found is None else found.samples(self._rank)

    def has_equal_forwards(self, plan: Plan, first: int, num_samples: int) -> bool:
        """Return whether all ranks make as many forwards in a step that is drawn."""
        found = self._assignment(plan, first, num_samples)
        return found is not None and bool(np.ptp(found.num_forwards) == 0)

    def look_ahead(self, plan: Plan, first: int, num_samples: int) -> None:
        """Begin to assign a step in a thread, if that takes long and can be done already."""
        key, indices = (plan.epoch, first), self._indices_of(first, num_samples)
        is_known = key in self._known or key in self._under_way
        if plan.costs is None or is_known or indices is None:
            return
        if num_samples * self._world_size >= _LARGE:
            ahead = (self._known, key, plan, indices)  # of this order, whatever comes after it
            self._under_way[key] = thread = Thread(target=self._try, args=ahead, daemon=True)
            thread.start()

    def assigned(
        self,
        plan: Plan,
        parts: Sequence[IntArray],
        first: int,
        num_samples: int,
        sizes: Sequence[int] | None,
        lengths: Sequence[IntArray] | None = None,
    ) -> Assigned:
        """Return what this rank computes of a step, and would have by count.

        Before lengths of others are known, what it would have is in proportion to what it has.

        Args:
            plan: in force.
            parts: its slots, forward by forward.
            first, num_samples: positions of the step.
            sizes: samples of each rank by count; None is as many on each.
            lengths: of its samples, forward by forward, as seen; None is as they are known.
        """
        indices = self._indices_of(first, num_samples)
        assert indices is not None, "a step that is handed out was drawn"
        features = self._costs.features(indices)
        equal = np.array_split(features, self._world_size)[self._rank]
        counted = equal
        if sizes is not None:
            counted = features[sum(sizes[: self._rank]) :][: sizes[self._rank]]
        own = [features[slots] for slots in parts]
        if lengths is not None and parts:
            own = [of_lengths(seen) for seen in lengths]
        total = self._costs.total
        work = Work(total(own), total([equal]), total([counted]))
        if not self._costs.is_known:
            num = max(sum(map(len, own)), 1)
            of = [tuple(one * len(some) // num for one in work.own) for some in (equal, counted)]
            work = Work(work.own, *of)
        found = None if plan.costs is None else self._assignment(plan, first, num_samples)
        checksum = plan.epoch + 1 if found is None else found.checksum
        return work, checksum, tuple(map(self._costs.sizes, own))

    def _assignment(self, plan: Plan, first: int, num_samples: int) -> Assignment | None:
        key = plan.epoch, first
        if (thread := self._under_way.pop(key, None)) is not None:
            thread.join()
        if key not in self._known:
            indices = self._indices_of(first, num_samples)
            if indices is None:
                return None
            self._find(self._known, key, plan, indices)
        return self._known[key]

    def _try(self, known: dict[Key, Assignment], key: Key, plan: Plan, indices: IntArray) -> None:
        with suppress(ValueError, OverflowError):  # raised where the step is asked for
            self._find(known, key, plan, indices)

    def _find(self, known: dict[Key, Assignment], key: Key, plan: Plan, indices: IntArray) -> None:
        """Assign a step's samples, and keep the answer in ``known``."""
        for old in list(known)[: max(0, len(known) - _KEPT + 1)]:
            known.pop(old, None)  # another thread may have dropped it
        assert plan.costs is not None
        features = self._costs.features(indices)
        workers, caps = plan.costs.workers(), plan.max_forward
        if plan.costs.knows != self._costs.is_known:  # of samples, and lengths are known now
            caps = None
            workers = _by_length(workers, self._costs) if self._costs.is_known else workers
        known[key] = found = assign(
            self._costs,
            features,
            workers,
            caps=caps,
            whole=self._whole,
            equal_forwards=self._equal_forwards,
        )
        if caps is not None and not self._has_warned:
            own = [features[slots] for slots in found.samples(self._rank)]
            largest = max((self._costs.total([one])[1] for one in own), default=0)
            if largest > caps[self._rank]:
                self._warn(largest, caps[self._rank])

    def _warn(self, largest: int, cap: int) -> None:
        """Say once that samples leave no way within what is known to fit."""
        self._has_warned = True
        remedy = "Cut longer samples, or leave them out."
        if self._whole:
            remedy = "A loop over `loader.steps()` takes a rank's part in several forwards."
        text = "A forward of rank %d has a size of %d, and %d is known to fit. %s"
        _LOGGER.warning(text, self._rank, largest, cap, remedy)


def _by_length(workers: WorkerCosts, costs: SampleCosts) -> WorkerCosts:
    """Return workers to whom samples cost their length, and the mean one what all did by count.

    For the first step after lengths became known: rank 0 planned it before. Sums of integers give
    the same mean on all ranks.
    """
    slope = np.zeros_like(workers.slope)
    slope[:, 1] = workers.slope[:, 0] // max(round(costs.mean[1]), 1)
    return WorkerCosts(slope, workers.intercept)


_LENGTH_BITS = 30  # of a length, whose square is a feature; the index is above it
_CHUNK = 1 << 16  # samples in one message, between which others pass
_STORED = "<i4"


@final
class SeenLengths:
    """The lengths of a data set, which become known as its samples are handed out.

    What a rank sees counts from the begin of the next epoch on, when every rank sends it to all:
    so the tables of all ranks are equal in every step, and no step waits for it. A message of 8
    bytes for each sample that was seen is sent once an epoch.

    A checkpoint holds the table of the last epoch's begin. What was seen since is lost with a run
    that is stopped: those samples count as the mean one until they are seen again.

    Args:
        costs: are corrected.
        ranks: that train.
    """

    def __init__(self, costs: SampleCosts, ranks: LoaderRanks) -> None:
        self._costs = costs
        self._ranks = ranks
        self._news: list[IntArray] = []
        self._text: str | None = None

    def record(self, indices: IntArray, lengths: IntArray) -> None:
        """Take in the lengths of samples that are handed out, by their index in the data set."""
        most = (1 << _LENGTH_BITS) - 1
        self._news.append(indices << _LENGTH_BITS | np.minimum(lengths, most))

    def merge(self) -> None:
        """Have all ranks know what each has seen. They come here at the begin of an epoch."""
        mine = np.concatenate([np.zeros(0, np.int64), *self._news])
        self._news = []
        for row in _of_all(self._ranks, mine) if self._ranks.world_size > 1 else [mine]:
            if len(row):
                self._text = None
                self._costs.correct(row >> _LENGTH_BITS, row & ((1 << _LENGTH_BITS) - 1))

    def written(self) -> str:
        """Return what all ranks know, as text; empty where that is nothing."""
        if self._text is None:
            table = self._costs.lengths.astype(_STORED)
            packed = zlib.compress(table.tobytes(), 1)
            self._text = base64.b64encode(packed).decode() if self._costs.is_known else ""
        return self._text

    def restore(self, text: str) -> None:
        """Take in what ``written`` returned."""
        if text:
            self._text = None
            table = _read(text)
            known = np.flatnonzero(table != UNKNOWN)
            self._costs.correct(known, table[known])

    def check(self, text: object) -> str:
        """Return ``text`` if it can be restored.

        Raises:
            ValueError: it is damaged, or of another data set.
        """
        num_samples = len(self._costs.lengths)
        try:
            if isinstance(text, str) and (not text or len(_read(text)) == num_samples):
                return text
        except (ValueError, zlib.error):
            pass
        raise invalid(
            "BalancedLoader.load_state_dict(state=...)",
            f"have lengths of {num_samples} samples",
            "damaged ones, or those of another data set",
            "Leave out the state's `lengths`: they become known again in an epoch.",
        )


def _of_all(ranks: LoaderRanks, mine: IntArray) -> Iterator[IntArray]:
    """Yield what all ranks have to send, in chunks that are the same on each."""
    counts = [count for (count,) in ranks.gather([len(mine)])()]
    for first in range(0, max(counts), _CHUNK):
        size = min(max(counts) - first, _CHUNK)
        own = mine[first : first + size]
        rows = ranks.gather([*own.tolist(), *[UNKNOWN] * (size - len(own))])()
        yield merged(rows, [min(max(count - first, 0), size) for count in counts])


def merged(rows: Sequence[Sequence[int]], counts: Sequence[int]) -> IntArray:
    """Return the first so many numbers of each row, one row after the other."""
    table = np.array(rows, np.int64)
    return table[np.arange(table.shape[1]) < np.array(counts)[:, None]]


def _read(text: str) -> IntArray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text, validate=True)), _STORED)
