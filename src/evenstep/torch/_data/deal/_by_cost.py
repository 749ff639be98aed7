"""Which samples of a step are whose by what they cost: the same integers on every rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Thread
from typing import NamedTuple, final

import numpy as np

from ...._planner import Plan, SampleCosts, Work, assign, of_lengths
from ...._types import IntArray
from ....solve import Assignment, WorkerCosts

_LOGGER = logging.getLogger("evenstep")
_KEPT = 256  # assignments: more steps than loaders fetch ahead
_LARGE = 1 << 13  # samples times ranks, from which on an assignment takes a millisecond or more

Key = tuple[int, int]
"""A plan's number, and a step's first position."""

Indices = Callable[[int, int], IntArray | None]
"""So many indices of the order from a position on; None while they are not drawn."""


class Assigned(NamedTuple):
    """What a rank tells of its samples of a step.

    Attributes:
        work: what they cost, and would have cost otherwise; None where no costs are known.
        checksum: of who has what by cost, or of the plan where samples are counted: all ranks have
            it in common.
        sizes: what each sample adds to the size of its forward, forward by forward; None where a
            forward has as many as samples.
    """

    work: Work | None
    checksum: int
    sizes: tuple[IntArray, ...] | None = None


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
        self._equal_forwards = self._whole = self._has_told = False
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
        return Assigned(work, checksum, tuple(map(self._costs.sizes, own)))

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
        if caps is not None and not self._has_told:
            own = [features[slots] for slots in found.samples(self._rank)]
            largest = max((self._costs.total([one])[1] for one in own), default=0)
            self._check(largest, caps[self._rank])

    def _check(self, largest: int, cap: int) -> None:
        """Say once where samples leave no way within what is known to fit."""
        if largest <= cap:
            return
        self._has_told = True
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
