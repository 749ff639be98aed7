"""What a recorded run shows of its workers; and what workers are worth, and one more of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._telemetry._event_lines import WARM_UP, Recorded
from .._telemetry._line import whole_steps
from .._types import Cluster, FloatArray, IntArray
from ..events import StepMeasured
from ..exceptions import invalid
from ..prediction._affine_filter import AffineFilter
from ..solve._allocate import allocate, apportion, makespan_s
from ..timemodels._curves import AffineTime


@dataclass(frozen=True, slots=True, eq=False)
class RunTimes:
    """What a recorded run shows of its workers, all arrays ``(world_size,)``.

    Attributes:
        times: fixed cost and cost per sample at the end of the run, as ``AffineFilter`` has them.
        speed_error: relative standard error of the cost per sample, and so of the speed.
        time_error: the same of the time that a worker takes for its last batch.
        is_line_known: whether a worker was seen at two sizes or more. Where not, all of its time
            is taken for cost per sample.
        num_steps: measured steps that the estimates come from.
        step_s: median seconds of the slowest worker's computing, as it was.
        global_batch_size: samples per step.
        ranks: whose times they are, in this order.
        names: host and device of every rank, empty where they were not recorded.
        max_batch_size: the caps last known; None if none was, or if they bound one forward only.
        overhead_s: median seconds of a step past its slowest worker's computing.
        saved_by_cost: of steps that were assigned by cost, the part of computing with equal counts
            that speed alone, length alone and both together save; None if there was none.
        untimed: ranks beside them that have none.
    """

    times: AffineTime
    speed_error: FloatArray
    time_error: FloatArray
    is_line_known: NDArray[np.bool_]
    num_steps: int
    step_s: float
    global_batch_size: int
    ranks: tuple[int, ...]
    names: tuple[str, ...] = ()
    max_batch_size: IntArray | None = None
    overhead_s: float = 0.0
    saved_by_cost: tuple[float, ...] | None = None
    untimed: tuple[int, ...] = ()

    @classmethod
    def of(cls, sizes: IntArray, seconds: FloatArray, **known: Any) -> RunTimes | None:
        """Return what steps show; None where a worker has no samples in any.

        Args:
            sizes: samples of each step and worker, ``(num_steps, world_size)``.
            seconds: that it computed, likewise.
            known: the other attributes.
        """
        estimator = AffineFilter()
        state = estimator.after(sizes, seconds)
        times = estimator.times(state)
        if times is None:
            return None
        return cls(
            times,
            estimator.slope_uncertainty(state),
            estimator.uncertainty(state),
            sizes.max(axis=0) > np.where(sizes > 0, sizes, sizes.max()).min(axis=0),
            **known,
        )


def read_run(path: str | Path) -> RunTimes:
    """Return what the workers of a recorded run need for any batch.

    From the last start in the file on, if training began more than once: earlier workers may
    have been others. The first step is passed over where there are more; of more than 20,000,
    the newest count. Damaged lines are left out, with a warning of the logger ``evenstep``.

    Args:
        path: a run's folder, as given to ``Runtime(run_dir=...)``, or its ``events.jsonl``.

    Raises:
        ValueError: there is no measured step.
        OSError: the file cannot be read.
    """
    run = Recorded.of(path, caller="read_run")
    steps = [step for _, step in run.steps]
    shown = steps[WARM_UP:] or steps
    sizes = np.array([step.batch_size for step in shown], np.int64)
    total, start = run.global_batch_size, run.start
    named = () if start is None else zip(start.hosts, start.devices, strict=True)
    caps = [run.caps.get(rank, total) for rank in range(sizes.shape[1])]
    found = RunTimes.of(
        sizes,
        np.array([step.compute_s for step in shown], np.float64),
        num_steps=sum(step.num_steps for step in shown),
        step_s=float(np.median([step.makespan_s for step in shown])),
        global_batch_size=total,
        ranks=tuple(range(sizes.shape[1])),
        names=tuple(f"{host} {device}" for host, device in named),
        max_batch_size=np.array(caps, np.int64) if run.caps else None,
        overhead_s=_overhead_s(steps),
        saved_by_cost=_saved_by_cost(shown),
    )
    if found is None:
        rule = "measure every worker at least once"
        got = f"nothing of rank {np.argmin((sizes > 0).sum(axis=0))} in {run.file}"
        remedy = "Record a run in which each has samples."
        raise invalid("read_run(path=...)", rule, got, remedy)
    return found


def _saved_by_cost(steps: Iterable[StepMeasured]) -> tuple[float, ...] | None:
    names = ("equal_split_s", "speed_split_s", "cost_split_s", "makespan_s")
    rows = [[getattr(step, name) for name in names] for step in steps]
    known = np.array([row for row in rows if None not in row], np.float64)
    if not len(known):
        return None
    equal_s, *other_s = known.mean(axis=0).tolist()
    return tuple(1 - one_s / equal_s for one_s in other_s)


def _overhead_s(steps: Iterable[StepMeasured]) -> float:
    """Return the median of what a step took past its computing."""
    past_s = [wall_s - step.makespan_s for step, wall_s in whole_steps(steps)]
    return max(float(np.median(past_s)), 0.0) if past_s else 0.0


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
