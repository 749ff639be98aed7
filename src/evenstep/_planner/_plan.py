"""The integers that all ranks apply in the same step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..events import Event
from ..solve import WorkerCosts
from ..solve._cut import cut


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

    def forwards(self, rank: int, num_samples: int) -> tuple[int, ...]:
        """Return how many of its ``num_samples`` each forward of ``rank`` gets in a step."""
        return cut(
            num_samples,
            self.max_forward[rank] if self.max_forward else None,
            self.granularity[rank] if self.granularity else 1,
        )

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
