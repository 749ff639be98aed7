"""Samples with costs, workers with speeds, and forwards with caps: what is to be partitioned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np

from .._types import IntArray, check_fields, check_range, fill, own
from ..exceptions import invalid
from ..timemodels._cost_model import CostModel

MOST = 1 << 50  # all costs together: products with a weight of 10 bits still fit into 64 bits
NEVER = 1 << 61  # the cost of what is not allowed
_MOST_BITS = 50  # of numbers up to MOST
_WEIGHT_BITS = 10
_BLOCK = 1 << 20  # costs that are held at once


@final
@dataclass(frozen=True, slots=True, eq=False)
class WorkerCosts:
    """The time that workers take, in integers of one unit for all workers.

    Attributes:
        slope: cost of one unit of each feature on each worker, at least 0,
            ``(world_size, num_features)``.
        intercept: cost of a step before its first sample, at least 0, ``(world_size,)``.
    """

    slope: IntArray
    intercept: IntArray

    def __post_init__(self) -> None:
        slope, intercept = np.asarray(self.slope), np.asarray(self.intercept)
        if slope.ndim != 2 or intercept.shape != slope.shape[:1] or not slope.size:
            raise invalid(
                "WorkerCosts(slope=..., intercept=...)",
                "have the shapes (world_size, num_features) and (world_size,)",
                f"{slope.shape} and {intercept.shape}",
                "Give one row of slopes, and one intercept, for every worker.",
            )
        for name, array in (("slope", slope), ("intercept", intercept)):
            if array.dtype.kind not in "iu" or (array < 0).any():
                raise invalid(
                    f"WorkerCosts({name}=...)",
                    "be integers of at least 0",
                    f"{array.dtype} from {array.min()} on",
                    "Choose a unit in which rounding costs nothing, such as nanoseconds.",
                )
            fill(self, **{name: own(array, np.int64)})

    @classmethod
    def equal(cls, world_size: int, features: Any) -> WorkerCosts:
        """Return equal workers, with a cost of 1 for each feature."""
        remedy = "Count them, or give `WorkerCosts`."
        check_range("partition(workers=...)", world_size, "an integer of at least 1", remedy)
        num_features = 1 if np.ndim(features) < 2 else np.shape(features)[1]
        return cls(np.ones((world_size, num_features), np.int64), np.zeros(world_size, np.int64))

    @classmethod
    def rounded(cls, model: CostModel, features: Any) -> WorkerCosts:
        """Return the seconds of a model as integers, as fine as these samples allow.

        Different CPUs may round differently, so one rank calls this and sends the integers.

        Args:
            model: a fitted one, or one of your own.
            features: of the samples of a step, ``(num_samples, num_features)``.
        """
        table = np.asarray(features, np.float64)
        most = (model.slope_s @ table.sum(axis=0) + model.intercept_s).max()
        padded = (model.slope_s @ table.max(axis=0)).max() * len(table)
        unit = max(float(most) / (MOST >> 1), float(padded) / (NEVER >> 1), 1e-300)
        slope, intercept = np.rint(model.slope_s / unit), np.rint(model.intercept_s / unit)
        return cls(slope.astype(np.int64), intercept.astype(np.int64))

    def fitting(self, features: IntArray) -> WorkerCosts:
        """Return them in the finest unit, by powers of two, in which samples can be partitioned.

        Mostly as they are. In integers alone, as all ranks have to find the same.

        Args:
            features: of the samples, ``(num_samples, num_features)``.
        """
        longest = features.max(axis=0).tolist()
        each = max(sum(map(int.__mul__, longest, slope)) for slope in self.slope.tolist())
        shift = (len(features) * each + int(self.intercept.max())).bit_length() - _MOST_BITS
        return self if shift <= 0 else WorkerCosts(self.slope >> shift, self.intercept >> shift)

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return len(self.intercept)


@final
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Forwards:
    """How the samples of a worker in a step are cut into forwards.

    Attributes:
        max_samples: most samples in one forward; None is no limit.
        size: memory size of each sample, such as its tokens, at least 0, ``(num_samples,)``; None
            if sizes are not limited.
        max_size: largest size of one forward, one number for all workers or ``(world_size,)``. The
            size is the sum over the forward's samples, or, if costs are padded, their number times
            the largest.
        equal: whether all workers run equally many forwards, as they must if forwards are
            collective. Otherwise each runs as few as its samples need.
        empty: whether a forward may have no sample if forwards are equal. Otherwise each has at
            least one, unless there are fewer samples than workers.
    """

    max_samples: int | None = None
    size: Any = None
    max_size: Any = None
    equal: bool = False
    empty: bool = False

    def __post_init__(self) -> None:
        if self.max_samples is not None:
            check_fields(self, max_samples=("at least 1", "None is no limit."))
        if (self.size is None) != (self.max_size is None):
            raise invalid(
                "Forwards(size=..., max_size=...)",
                "be given together",
                f"size {'missing' if self.size is None else 'alone'}",
                "Give the size of every sample, and the most that a forward may have.",
            )


@final
class Problem:
    """What is to be partitioned, checked.

    Args:
        features: of every sample, as ``partition`` takes them.
        workers: how long they take.
        forwards: how the samples of a worker are cut.

    Attributes:
        features: of every sample, ``(num_samples, num_features)``.
        workers: how long they take.
        size: what counts for memory, ``(num_samples,)``; zeros where nothing does.
        max_size: of a forward, ``(world_size,)``.
        max_samples: of a forward.
        equal: whether all workers run as many forwards.
        empty: whether some of those may have no sample.
        is_capped: whether one forward may be too small for what a worker gets.

    Raises:
        ValueError: an argument is out of range, or a sample fits into no forward.
        OverflowError: the costs exceed what 64 bits can hold with room to spare.
    """

    def __init__(self, features: Any, workers: WorkerCosts, forwards: Forwards) -> None:
        table = _whole("partition(features=...)", features)
        table = table[:, None] if table.ndim == 1 else table
        num_samples, shape = len(table), workers.slope.shape
        if table.ndim != 2 or table.shape[1] != shape[1]:
            raise invalid(
                "partition(features=...)",
                f"have {shape[1]} columns, as the workers' slopes have",
                table.shape,
                "Give one row for each sample.",
            )
        if not num_samples:
            raise invalid("partition(features=...)", "have a sample", 0, "Partition what is there.")
        _check_sum(table, workers)
        self.features, self.workers = table, workers
        self.num_samples, self.world_size = num_samples, workers.world_size
        self.size = np.zeros(num_samples, np.int64)
        self.max_size = np.full(shape[0], NEVER)
        if forwards.size is not None:
            self.size = _whole("Forwards(size=...)", forwards.size)
            caps = _whole("Forwards(max_size=...)", forwards.max_size)
            self.max_size = np.broadcast_to(caps, shape[:1])
            _check_size(self.size, self.max_size, num_samples)
        self.max_samples = forwards.max_samples or num_samples
        self.equal, self.empty = forwards.equal, forwards.equal and forwards.empty
        over = int(self.size.sum()) > self.max_size.min()
        self.is_capped = self.max_samples < num_samples or bool(over)

    def costs(self, samples: IntArray) -> IntArray:
        """Return what samples cost, `NEVER` if too large, ``(len(samples), world_size)``."""
        found = self.features[samples] @ self.workers.slope.T
        if self.is_capped:
            found[self.size[samples][:, None] > self.max_size] = NEVER
        return found

    def descending(self) -> IntArray:
        """Return the samples from the most expensive to the cheapest, on average over workers."""
        typical = self.features @ self.workers.slope.sum(axis=0)
        return np.argsort(-typical, kind="stable")

    def load(self, owner: IntArray, forward: IntArray, *, padded: bool) -> IntArray:
        """Return when every rank ends, ``(world_size,)``."""
        load = self.workers.intercept.copy()
        cost = (self.features * self.workers.slope[owner]).sum(axis=1)
        if not padded:
            np.add.at(load, owner, cost)
            return load
        number = owner * (int(forward.max()) + 1) + forward
        longest, count = np.zeros(int(number.max()) + 1, np.int64), np.bincount(number)
        np.maximum.at(longest, number, cost)
        rank = np.arange(len(longest)) // (int(forward.max()) + 1)
        np.add.at(load, rank, longest * count)
        return load

    def bound(self) -> tuple[int, str]:
        r"""Return a time before which no assignment ends, padding left out, and why.

        For any weights $\lambda_r \ge 0$ of the workers, the last one ends no earlier than
        $(\sum_i \min_r \lambda_r c_{ri} + \sum_r \lambda_r a_r) / \sum_r \lambda_r$: the mean of
        their ends is no later than the last. Weights in proportion to speeds are best where
        workers differ by a factor alone. And no sample takes less than on its best worker.
        """
        total = np.maximum(self.features.sum(axis=0) @ self.workers.slope.T, 1)
        weight = np.maximum((int(total.min()) << _WEIGHT_BITS) // total, 1)
        rows = max(1, _BLOCK // self.world_size)
        # As Python's integers: a product fits into 64 bits, and that of many workers does not.
        work = sum(map(int.__mul__, weight.tolist(), self.workers.intercept.tolist()))
        longest = 0
        for first in range(0, self.num_samples, rows):
            cost = self.features[first : first + rows] @ self.workers.slope.T
            work += int((cost * weight).min(axis=1).sum())
            longest = max(longest, int((cost + self.workers.intercept).min(axis=1).max()))
        mean = -(-work // int(weight.sum()))
        return (mean, "work") if mean >= longest else (longest, "sample")


def _whole(name: str, values: Any) -> IntArray:
    array = np.asarray(values)
    if array.dtype.kind not in "iu" or (array.size and array.min() < 0):
        raise invalid(
            name, "be integers of at least 0", f"{array.dtype}", "Round them in a fine unit."
        )
    return array.astype(np.int64)


def _check_sum(features: IntArray, workers: WorkerCosts) -> None:
    """Refuse sums past 64 bits; in floats, which do not wrap around."""
    slope = workers.slope.astype(np.float64)
    most = slope @ features.sum(axis=0, dtype=np.float64) + workers.intercept
    longest = len(features) * (slope @ features.max(axis=0).astype(np.float64))
    if most.max() > MOST or longest.max() > NEVER:
        raise OverflowError(
            f"`partition`: the samples together cost a worker {most.max():.3g}, and as often the "
            f"longest one {longest.max():.3g}, where 2**50 and 2**61 are the most. Choose a "
            f"coarser unit."
        )


def _check_size(size: IntArray, max_size: IntArray, num_samples: int) -> None:
    if size.shape != (num_samples,):
        raise invalid(
            "Forwards(size=...)", f"have {num_samples} entries", size.shape, "One for each sample."
        )
    if size.max() > max_size.max():
        sample = int(size.argmax())
        raise invalid(
            "Forwards(max_size=...)",
            "be at least the size of each sample on some worker",
            f"{max_size.max()} where sample {sample} has {size[sample]}",
            "Cut the sample, leave it out, or raise the cap.",
        )
