"""Step times of workers as they are, without each of them, and with one more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .._types import Cluster, IntArray
from ..exceptions import invalid
from ..solve._allocate import allocate, apportion, makespan_s
from ..timemodels._curves import AffineTime


@dataclass(frozen=True, slots=True)
class PlannedSplit:
    """One way to share out the global batch, and what it costs.

    Attributes:
        batch_size: local batch sizes, one per worker; 0 for one that takes no part.
        step_s: expected seconds of a step.
    """

    batch_size: tuple[int, ...]
    step_s: float

    @property
    def samples_per_s(self) -> float:
        """Samples of all workers per second."""
        return sum(self.batch_size) / self.step_s


@dataclass(frozen=True, slots=True)
class Advice:
    """What to expect of workers, together and without each.

    Attributes:
        equal: the equal split, as far as caps allow one.
        balanced: the best split in which every worker computes at least one sample.
        best: the best split in which workers may be left out: no choice of workers is faster.
        without: for each worker, the best split in which it is left out, others too where that
            is faster; None if they cannot hold the global batch.
        more: the best split in which one more worker may take part, for each that was offered;
            the newcomer last.
    """

    equal: PlannedSplit
    balanced: PlannedSplit
    best: PlannedSplit
    without: tuple[PlannedSplit | None, ...]
    more: tuple[PlannedSplit, ...]

    @property
    def worth_keeping(self) -> tuple[bool, ...]:
        """Whether each worker takes part in ``best``."""
        return tuple(size > 0 for size in self.best.batch_size)

    def brings(self, rank: int) -> float | None:
        """Return by which share a step is longer without ``rank``, than the best there is.

        For one that is not worth keeping, than with all of them: what it costs, as a negative
        number. None if the others cannot hold the global batch.
        """
        without = self.without[rank]
        if without is None:
            return None
        now = self.best if self.worth_keeping[rank] else self.balanced
        return without.step_s / now.step_s - 1

    def adds(self, index: int) -> float:
        """Return by which share of the best step one with the newcomer ``index`` is shorter."""
        return 1 - self.more[index].step_s / self.best.step_s


def advise(
    times: AffineTime,
    global_batch_size: int,
    *,
    max_batch_size: int | IntArray | None = None,
    more: AffineTime | None = None,
    more_max_batch_size: IntArray | None = None,
    overhead_s: float = 0.0,
) -> Advice:
    r"""Return what workers with known times are worth, all at the same global batch.

    A step takes $\max_r t_r(b_r)$ plus ``overhead_s``, for any set of workers. Each split is the
    exact optimum for the times (``allocate``), so a forecast is as good as they are: it knows no
    noise, and no communication that grows with the number of workers. ``best`` comes from the
    same solver with smallest sizes of 0: what any choice of workers can do is among its choices.

    Args:
        times: fixed cost and cost per sample of every worker.
        global_batch_size: samples per step, at least one for each worker.
        max_batch_size: most samples that fit in memory, one number or ``(world_size,)``; None
            is no cap.
        more: times of workers that might be added, each alone.
        more_max_batch_size: most samples that fit in theirs, one number each; None is no cap.
        overhead_s: seconds of a step past computing: communication, optimizer, the next batch.

    Raises:
        ValueError: an argument is out of range, or the caps do not hold the global batch.
    """
    if not (np.isfinite(overhead_s) and overhead_s >= 0):
        remedy = "0 counts computing alone."
        raise invalid("advise(overhead_s=...)", "be finite and at least 0", overhead_s, remedy)
    everybody = Cluster(times.world_size, global_batch_size, max_batch_size=max_batch_size)
    choice = Cluster(times.world_size, global_batch_size, 0, everybody.max_batch_size)

    def split(batch_size: IntArray, of: AffineTime = times) -> PlannedSplit:
        return PlannedSplit(tuple(batch_size.tolist()), makespan_s(of, batch_size) + overhead_s)

    without = [_without(times, choice, rank) for rank in range(times.world_size)]
    return Advice(
        equal=split(apportion(np.ones(times.world_size), everybody)),
        balanced=split(allocate(times, everybody)),
        best=split(allocate(times, choice)),
        without=tuple(None if sizes is None else split(sizes) for sizes in without),
        more=tuple(
            split(allocate(joined, cluster), joined)
            for joined, cluster in _grown(times, choice, more, more_max_batch_size)
        ),
    )


def _without(times: AffineTime, cluster: Cluster, rank: int) -> IntArray | None:
    """Return the best sizes with none for ``rank``; None where the others cannot hold them."""
    others = np.arange(cluster.world_size) != rank
    caps = cluster.max_batch_size[others]
    if caps.sum() < cluster.global_batch_size:
        return None
    left = AffineTime(times.intercept_s[others], times.slope_s[others])
    sizes = np.zeros(cluster.world_size, np.int64)
    sizes[others] = allocate(left, Cluster(len(caps), cluster.global_batch_size, 0, caps))
    return sizes


def _grown(
    times: AffineTime, cluster: Cluster, more: AffineTime | None, caps: IntArray | None
) -> Iterator[tuple[AffineTime, Cluster]]:
    """Yield the workers with one more, for each that is offered."""
    if more is None:
        return
    total = cluster.global_batch_size
    each = np.full(more.world_size, total) if caps is None else caps
    for intercept_s, slope_s, cap in zip(more.intercept_s, more.slope_s, each, strict=True):
        joined = AffineTime(
            np.append(times.intercept_s, intercept_s), np.append(times.slope_s, slope_s)
        )
        max_batch_size = np.append(cluster.max_batch_size, cap)
        yield joined, Cluster(joined.world_size, total, 0, max_batch_size)
