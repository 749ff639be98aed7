"""What a worker reports of a step, and the integers that all ranks apply in the same step."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Generic, NamedTuple, TypeVar, final

import numpy as np

from .._types import Cluster, IntArray, Resources, StepTimings
from ..solve import WorkerCosts
from ..solve._allocate import apportion, cut

LONG_STEP = 1 / 3
"""Of a reading's seconds: such a step is one by itself."""
MOST_STEPS = 32
"""Of a reading, and between two decisions."""

Step = TypeVar("Step")


@final
class Reading:
    """One or more steps at the same sizes, seen as one.

    Args:
        steps: what was measured in each, in order; made when it is asked for.
    """

    def __init__(self, steps: tuple[Callable[[], StepTimings], ...]) -> None:
        self._steps = steps

    @property
    def num_steps(self) -> int:
        """How many there are."""
        return len(self._steps)

    @cached_property
    def timings(self) -> StepTimings:
        """Every worker's median, which pauses of the machine leave alone.

        What else is known is as in the newest step.
        """
        if len(self._steps) == 1:
            return self._steps[0]()
        steps = [step() for step in self._steps]
        ran = steps[-1].batch_size > 0
        compute_s = np.median([step.compute_s for step in steps], axis=0)
        return replace(
            steps[-1],
            compute_s=np.where(ran, compute_s, 0.0),
            data_s=np.median([step.data_s for step in steps], axis=0),
            num_steps=len(steps),
        )


@final
class Readings(Generic[Step]):
    """Collects steps until they have taken long enough together; long ones are taken alone.

    How many steps the next reading has is known when one is complete, by their median. So a pause
    of the machine is no reading by itself, and ranks know beforehand when the next plan is due.

    Args:
        reading_s: seconds that short steps take together; 0 makes each step one.

    Attributes:
        num_left: how many more steps the reading under way takes at the least; 1 or more.
    """

    def __init__(self, reading_s: float) -> None:
        self._reading_s = reading_s
        self.num_left = 1
        self._key: Hashable = None
        self._steps: list[Step] = []
        self._took_s: list[float] = []  # the slowest worker's, of each
        self._lasted_s: list[float] = []  # from batch to batch

    def add(
        self,
        key: Hashable,
        took_s: float,
        step: Step,
        *,
        wall_s: float = 0.0,
        at_once: bool = False,
    ) -> tuple[Step, ...]:
        """Take in a step; return the steps of the reading that it completes, none if it does not.

        Args:
            key: the sizes; steps of others are dropped. None where each step may have its own.
            took_s: seconds that the slowest worker computed.
            step: what was measured.
            wall_s: seconds from batch to batch, where that is known and more.
            at_once: whether to make a reading of what there is.
        """
        if key != self._key:
            self._key, self._steps, self._took_s, self._lasted_s = key, [], [], []
        self._steps.append(step)
        self._took_s.append(took_s)
        self._lasted_s.append(max(wall_s, took_s))
        needed = num_together(self._reading_s, median(self._took_s), median(self._lasted_s))
        num_left = max(self.num_left - 1, needed - len(self._steps))
        if num_left and not at_once:
            self.num_left = num_left
            return ()
        reading = tuple(self._steps)
        self.num_left = needed
        self._steps, self._took_s, self._lasted_s = [], [], []
        return reading


def num_together(seconds: float, took_s: float, lasted_s: float) -> int:
    """Return how many steps are decided on together: the steps of so many seconds, or one.

    Args:
        seconds: that they take together.
        took_s: that the slowest worker computes in a step.
        lasted_s: from batch to batch.
    """
    if not took_s < LONG_STEP * seconds:  # no number is no short step
        return 1
    return min(max(round(seconds / max(lasted_s, 1e-9)), 1), MOST_STEPS)


class Work(NamedTuple):
    """What a rank computed in a step that was assigned by cost, and would have otherwise.

    Each the sum of the features of its samples; where samples are padded, those of the longest one
    of each forward, times its samples.

    Attributes:
        own: as it was.
        equal: of its part, had all ranks as many samples each.
        by_count: of its part under the plan's ``batch_size``.
    """

    own: tuple[int, ...]
    equal: tuple[int, ...]
    by_count: tuple[int, ...]


class Report(NamedTuple):
    """One worker's own figures for one step.

    A tuple, and no dataclass: rank 0 makes one of every rank in every step, ten times as fast.

    Attributes:
        step: the optimizer step that was measured, counted over the run, from 0.
        batch_size: samples this worker computed in it. 0 for a rank that ran a dummy.
        global_num_samples: samples of the step over all workers.
        compute_s: own forward and backward in seconds, without waiting for others.
        data_s: waiting for input in seconds.
        wall_s: seconds from the batch before to this one; None for the first step of a loop.
        peak_bytes: most memory in use during the step; 0 where it is not read.
        capacity_bytes: memory the device offers; 0 where it is not read.
        limit: most samples that one forward of this worker may have from now on, found by trial
            or by running out of memory; None where nothing new is known. Where samples are assigned
            by cost, the most of what ``Cost(max_size=...)`` counts.
        largest_forward: samples of the largest forward, or what ``Cost`` counts of it, to which
            ``peak_bytes`` belongs; 0 is what the plan says.
        again: whether memory ran out and parts of the step ran again, so that its time says
            nothing.
        holds: whether this worker asks for no other sizes, as each costs a compilation and it has
            had as many as it can.
        free_cpu: share of its CPUs that this worker can have as it reports, in [0, 1]; None where
            it is not read.
        free_memory_bytes: memory that this worker can have; likewise.
        fault: why this worker measures nothing any more, in words; empty while it does.
        work: of samples that were assigned by cost; None where they were counted.
    """

    step: int
    batch_size: int
    global_num_samples: int
    compute_s: float
    data_s: float
    wall_s: float | None = None
    peak_bytes: int = 0
    capacity_bytes: int = 0
    holds: bool = False
    limit: int | None = None
    again: bool = False
    largest_forward: int = 0
    free_cpu: float | None = None
    free_memory_bytes: int = 0
    fault: str = ""
    work: Work | None = None

    def problem(self) -> str | None:
        """Return what is wrong with the figures, or None if they can be planned by."""
        if self.fault:
            return f"it measures nothing any more: {self.fault}"
        if self.again:
            return "memory ran out, and parts of the step ran again: its time says nothing"
        if self.batch_size and not (math.isfinite(self.compute_s) and self.compute_s > 0):
            return f"compute_s is {self.compute_s}, and has to be positive and finite"
        if not (math.isfinite(self.data_s) and self.data_s >= 0):
            return f"data_s is {self.data_s}, and has to be finite and at least 0"
        return None


def lasted_s(reports: Sequence[Report]) -> float:
    """Return the seconds from the batch before to this one, on the slowest rank; 0 if unknown."""
    return max(report.wall_s or 0.0 for report in reports)


def apart(reports: Sequence[Report]) -> float:
    """Return by how much the first worker ended before the last, as a share of the last's time.

    Infinite where one asks to keep the sizes, or had nothing to compute: never level.

    Plain numbers, and no arrays: everybody waits, and right after an idle moment the first
    operation on an array takes a tenth of a millisecond.
    """
    for report in reports:
        if not report.batch_size or report.holds:
            return math.inf
    times = [report.compute_s for report in reports]
    return 1 - min(times) / max(times)


def timings_of(reports: Sequence[Report]) -> StepTimings:
    """Return what all ranks say of a step, as arrays."""
    free_cpu = [report.free_cpu for report in reports]
    memory = [report.free_memory_bytes for report in reports]
    known = None not in free_cpu
    return StepTimings(
        np.array([report.batch_size for report in reports]),
        np.array([report.compute_s for report in reports], dtype=np.float64),
        data_s=np.array([report.data_s for report in reports], dtype=np.float64),
        resources=Resources(np.array(free_cpu, np.float64), np.array(memory)) if known else None,
    )


@dataclass(frozen=True, slots=True)
class PlanCosts:
    """What samples cost each worker, in integers from which every rank finds the same assignment.

    Attributes:
        slope: of each feature, one row for each rank.
        intercept: of a step, one for each rank.
        knows: whether lengths are known, so that forwards are limited by those; else by samples.
    """

    slope: tuple[tuple[int, ...], ...]
    intercept: tuple[int, ...]
    knows: bool = True

    @classmethod
    def of(cls, workers: WorkerCosts, *, knows: bool = True) -> PlanCosts:
        """Return the integers of ``workers``."""
        slope = tuple(map(tuple, workers.slope.tolist()))
        return cls(slope, tuple(workers.intercept.tolist()), knows)

    def workers(self) -> WorkerCosts:
        """Return what ``solve.partition`` takes."""
        return WorkerCosts(np.array(self.slope, np.int64), np.array(self.intercept, np.int64))


@dataclass(frozen=True, slots=True)
class Plan:
    """Who computes how many samples from one step on, until a later plan replaces it.

    Attributes:
        epoch: number of the plan, from 0. It grows by one whenever the sizes change, so two ranks
            that name the same epoch hold the same integers.
        first_step: first optimizer step that uses it, counted over the whole run, from 0.
        batch_size: local batch sizes, one per rank, adding up to the global batch.
        tail: the same for the short last batch of an epoch, adding up to its own size; None if
            the data set divides evenly or the short batch is dropped. Zeros where it has fewer
            samples than workers.
        max_forward: most samples that a rank may put through one forward, one per rank; None is no
            limit. Loops over ``loader.steps()`` cut larger local batches into micro-batches. With
            ``costs``, the most of what ``Cost(max_size=...)`` counts, once lengths are known.
        granularity: samples that those micro-batches keep together, one per rank; None is 1.
        reason: the policy's own words.
        first: samples that each rank begins with, one per rank, while those left of a full step
            are up for claims; None where every rank computes its own.
        costs: what samples cost, by which each step's are assigned; None where a plan counts them.
            ``batch_size`` is then what counting would give.
    """

    epoch: int
    first_step: int
    batch_size: tuple[int, ...]
    tail: tuple[int, ...] | None = None
    max_forward: tuple[int, ...] | None = None
    granularity: tuple[int, ...] | None = None
    reason: str = ""
    first: tuple[int, ...] | None = None
    costs: PlanCosts | None = None

    def forwards(self, rank: int, num_samples: int, *, fewest: int = 1) -> tuple[int, ...]:
        """Return how many of its ``num_samples`` each forward of ``rank`` gets in a step.

        Args:
            rank: whose they are.
            num_samples: all that it has.
            fewest: forwards it makes at least. Where it has fewer samples, some are stand-ins.
        """
        return cut(
            num_samples,
            self.max_forward[rank] if self.max_forward else None,
            self.granularity[rank] if self.granularity else 1,
            fewest=fewest,
        )

    def most_forwards(self, sizes: Sequence[int]) -> int:
        """Return how many forwards the rank needs that needs most of them.

        Args:
            sizes: samples of each rank, one per rank.
        """
        if self.max_forward is None:
            return 1
        return max(len(self.forwards(rank, size)) for rank, size in enumerate(sizes))

    @property
    def tile(self) -> int | None:
        """Samples that keep together on all ranks; None if those differ, so no claim is for all."""
        if self.granularity is None:
            return 1
        return self.granularity[0] if len(set(self.granularity)) == 1 else None


def split_tail(
    batch_size: IntArray,
    num_samples: int,
    caps: IntArray | None,
    *,
    smallest: int = 0,
    granularity: int = 1,
) -> IntArray:
    """Return how many of the last ``num_samples`` each worker computes.

    In proportion to ``batch_size``, by largest remainder. Every worker that has samples in a full
    step gets at least one, where there are as many samples as such workers. With fewer, some get
    none, and run a stand-in of weight 0. Other smallest sizes do not bind, since no split of so
    few might keep them. What fits in memory does bind.

    Args:
        batch_size: sizes of the full steps, ``(world_size,)``.
        num_samples: samples left, at least 1 and fewer than the sizes add up to.
        caps: most samples for each worker, ``(world_size,)``; None is no cap.
        smallest: fewest samples for any worker, where its model needs some and they fit.
        granularity: samples that come and go together here too, where every forward is to have
            the same number. One worker carries what is left of one. Given up where there are
            fewer such forwards than workers, and enough samples.

    Returns:
        Local sizes, ``(world_size,)``, adding up to ``num_samples``.
    """
    one_each = np.minimum(batch_size, 1)
    wanted = np.maximum(one_each, smallest)
    if caps is not None:
        wanted = np.minimum(wanted, caps)
    for granule in (granularity, 1):
        for least in (wanted, one_each):
            needed = -(-least // granule)
            if needed.sum() <= -(-num_samples // granule):
                return _in_granules(batch_size, num_samples, caps, needed, granule)
    return _in_granules(batch_size, num_samples, caps, np.zeros_like(one_each), granularity)


def _in_granules(
    batch_size: IntArray, num_samples: int, caps: IntArray | None, least: IntArray, granule: int
) -> IntArray:
    """Return the split in whole granules, but for one worker that carries what is left of one.

    Args:
        batch_size: what the shares are in proportion to, ``(world_size,)``.
        num_samples: samples left.
        caps: most samples for each worker, ``(world_size,)``; None is no cap.
        least: fewest granules for each worker, ``(world_size,)``.
        granule: samples of one.
    """
    num_granules = -(-num_samples // granule)
    most = None if caps is None else -(-caps // granule)
    last = Cluster(len(batch_size), num_granules, min_batch_size=least, max_batch_size=most)
    shares = np.maximum(batch_size, 1e-9).astype(np.float64)
    sizes = apportion(shares, last) * granule
    sizes[np.argmax(sizes / shares)] -= num_granules * granule - num_samples
    return sizes
