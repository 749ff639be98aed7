"""The integers that all ranks apply in the same step, and how they follow from a step's sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .._types import Cluster, IntArray
from ..events import Event
from ..solve import WorkerCosts
from ..solve._apportion import apportion, cut
from ._job import Job


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


@dataclass(frozen=True, slots=True)
class Outcome:
    """What followed from one step.

    Attributes:
        plan: what holds from now on; the very same object if nothing changed.
        events: the facts, in order.
    """

    plan: Plan
    events: tuple[Event, ...]


def make_plan(
    job: Job,
    batch_size: IntArray,
    *,
    epoch: int,
    first_step: int,
    cluster: Cluster,
    caps: IntArray | None,
    reason: str,
) -> Plan:
    """Return the plan of these sizes.

    Args:
        job: what is planned for.
        batch_size: local batch sizes of a full step, ``(world_size,)``.
        epoch: number of the plan.
        first_step: first step that uses it.
        cluster: what the sizes were decided for.
        caps: most samples of a rank, or of its forwards, ``(world_size,)``; None is no cap.
        reason: why, in words.
    """
    tail = None
    if job.tail_size:
        tail = split_tail(
            batch_size,
            job.tail_size,
            None if job.cuts else caps,
            smallest=job.tail_smallest,
            granularity=job.tail_granularity,
        )
    max_forward = job.max_forward(caps)
    return Plan(
        epoch=epoch,
        first_step=first_step,
        batch_size=tuple(batch_size.tolist()),
        tail=None if tail is None else tuple(tail.tolist()),
        max_forward=None if max_forward is None else tuple(max_forward.tolist()),
        granularity=tuple(cluster.granularity.tolist()) if job.cuts else None,
        reason=reason,
    )


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
