"""Workers whose samples cost different times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from .._types import FloatArray, IntArray
from ..exceptions import invalid
from ..timemodels._cost_model import CostModel
from ._workload import Workload

_MOST_STATES = 1 << 14  # numbers of workers of each kind that are looked at
_FINE = 1e-4  # relative error of the earliest end


def lower_bound_s(
    cost: FloatArray, intercept_s: FloatArray, slope_s: FloatArray, *, padded: bool
) -> tuple[float, str]:
    r"""Return a time before which no assignment ends, and what it comes from.

    Worker $r$ ends at $a_r + s_r \sum_i c_i$; with ``padded``, at $a_r + s_r n \max_i c_i$. One
    without samples takes no part.

    - ``"work"``: all workers end together, if samples could be cut anywhere.
    - ``"sample"``: the most expensive sample on its best worker.
    - ``"runs"``: the sorted samples in the best runs, where samples are padded. That is the best
      assignment there is, as no exchange of two samples between runs shortens the longest of both.
      With more than about 14 kinds of workers it is not looked for, and padding is left out.

    Args:
        cost: of every sample, at least 0, ``(num_samples,)``.
        intercept_s: $a$, ``(world_size,)``.
        slope_s: $s$, positive, ``(world_size,)``.
        padded: whether each sample takes as long as the longest of its worker.
    """
    level_s = CostModel(intercept_s, slope_s[:, None]).level_s([cost.sum()])
    sample_s = float((intercept_s + slope_s * cost.max()).min())
    bound = (level_s, "work") if level_s >= sample_s else (sample_s, "sample")
    if not padded:
        return bound
    found_s = best_runs_s(cost, intercept_s, slope_s, at_least_s=bound[0])
    return bound if found_s is None else (found_s, "runs")


def best_runs_s(
    cost: FloatArray, intercept_s: FloatArray, slope_s: FloatArray, *, at_least_s: float
) -> float | None:
    """Return the earliest end over all runs of the sorted samples and all orders of the workers.

    Exact, by the number of workers of each kind that have had their run: of those, the furthest
    sample that is dealt out by a given time. Never later than the earliest end, and at most 1 part
    in 10,000 earlier. None where there are too many kinds.

    Args:
        cost, intercept_s, slope_s: as above.
        at_least_s: a bound that is known, positive.
    """
    kinds, counts = np.unique(np.stack([intercept_s, slope_s]), axis=1, return_counts=True)
    if np.prod(counts + 1.0) > _MOST_STATES:
        return None
    cost = np.maximum(np.sort(cost)[::-1], 1e-300)
    low, high = at_least_s, at_least_s
    while not _suffices(cost, kinds, counts, high):
        low, high = high, 2 * high
    while high - low > _FINE * high:
        middle = (low + high) / 2
        if _suffices(cost, kinds, counts, middle):
            high = middle
        else:
            low = middle
    return low


def _suffices(cost: FloatArray, kinds: FloatArray, counts: IntArray, end_s: float) -> bool:
    """Return whether all samples can be done by ``end_s``."""
    num_samples = len(cost)
    places = np.arange(num_samples)
    room = np.maximum(end_s - kinds[0], 0)[:, None] / kinds[1][:, None] / cost
    reached = places + np.minimum(room, num_samples).astype(np.int64)
    after = np.append(reached, np.full((len(counts), 1), num_samples), axis=1).clip(max=num_samples)
    furthest = np.zeros(counts + 1, np.int64)
    for _ in range(int(counts.sum())):
        for kind in range(len(counts)):
            more = np.moveaxis(furthest, kind, 0)
            np.maximum(more[1:], after[kind][more[:-1]], out=more[1:])
    return int(furthest[tuple(counts)]) >= num_samples


@final
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SampleWorkload(Workload):
    r"""Workers whose samples cost different times: made by ``Scenario.with_lengths``.

    $t_{kr} = (a_r + c_{kr} \sum_i w_i) \, j_{kr}$ over the samples $i$ of a worker, and 0 without
    any; where samples are padded, $n \max_i w_i$ stands for the sum. A sample of mean cost has
    $w = 1$, so that workers are as fast as without lengths.

    A plan that counts samples deals those of a step out in their order. What could be foreseen by
    count is their mean.

    Attributes:
        lengths: of all samples, by index, ``(num_samples,)``.
        order: indices of each step's samples, ``(num_steps, global_batch_size)``.
        weight: $w$ of all samples, ``(num_samples,)``.
        padded: whether each sample takes as long as the longest of its worker.
    """

    lengths: IntArray
    order: IntArray
    weight: FloatArray
    padded: bool

    def __post_init__(self) -> None:
        Workload.__post_init__(self)  # `super()` does not know a class with slots
        for array in (self.lengths, self.order, self.weight):
            array.flags.writeable = False

    @property
    def global_batch_size(self) -> int:
        """Samples of a step."""
        return int(self.order.shape[1])

    def seconds(self, step: int, batch_size: IntArray) -> FloatArray:
        return self.assigned_s(step, np.repeat(np.arange(self.world_size), batch_size))

    def chunk_s(self, step: int, worker: int, num_samples: int, *, again: bool) -> float:
        raise invalid(
            "sim.run(scheme=...)",
            "leave samples where the plan has them, if these have lengths",
            "one that moves them",
            "Leave it out: the default is `Bsp()`.",
        )

    def assigned_s(self, step: int, owner: IntArray) -> FloatArray:
        """Return what every worker needs for the samples that it owns, ``(world_size,)``.

        Args:
            step: when.
            owner: worker of each sample, in the order of the step, ``(global_batch_size,)``.
        """
        weight, counts = (
            self.weight[self.order[step]],
            np.bincount(owner, minlength=self.world_size),
        )
        work = np.zeros(self.world_size)
        if self.padded:
            np.maximum.at(work, owner, weight)
            work *= counts
        else:
            np.add.at(work, owner, weight)
        intercept_s, slope_s = self._line(step)
        return np.where(counts > 0, intercept_s + slope_s * work, 0.0)

    def lower_bound_s(self, step: int) -> tuple[float, str]:
        """Return a time that no assignment beats, jitter known, and what it comes from.

        ``"work"``, all work over all speeds; ``"sample"``, the longest sample on its best worker;
        or ``"runs"``, the best runs of the sorted samples, where samples are padded.
        """
        return lower_bound_s(self.weight[self.order[step]], *self._line(step), padded=self.padded)

    def _line(self, step: int) -> tuple[FloatArray, FloatArray]:
        assert self.jitter is not None
        jitter = self.jitter[step]
        return self.intercept_s * jitter, self.slope_s[step] * jitter
