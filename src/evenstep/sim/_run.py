"""Run a policy on simulated workers, and the plan that knows what they will do beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .._minmax import allocate
from .._types import Cluster, FloatArray, IntArray
from ..control import Bounds, Job, Planner, Report
from ..exceptions import invalid
from ..policies import AbstractPolicy, by_name
from ..timemodels import AffineTime
from ._comm import AbstractComm, NoComm
from ._workload import Workload


@dataclass(frozen=True, slots=True, eq=False)
class SimReport:
    """What happened in a simulated run.

    Attributes:
        step_s: seconds of every step, communication included, ``(num_steps,)``.
        batch_size: local batch sizes, ``(num_steps, world_size)``.
        compute_s: what each worker computed for, likewise.
        reasons: why each plan was as it was, in the policy's words, one for every step.
    """

    step_s: FloatArray
    batch_size: IntArray
    compute_s: FloatArray
    reasons: tuple[str, ...]

    @property
    def idle_share(self) -> float:
        """Share of all workers' time that was spent waiting for others, in [0, 1)."""
        return float(1 - self.compute_s.sum() / (self.step_s.sum() * self.compute_s.shape[1]))

    @property
    def samples_per_s(self) -> float:
        """Samples of all workers over the time of all steps."""
        return float(self.batch_size.sum() / self.step_s.sum())

    def regret(self, oracle_s: FloatArray) -> float:
        """Return mean step time over that of ``oracle``, less 1."""
        return float(self.step_s.mean() / oracle_s.mean() - 1)


def run(
    policy: str | AbstractPolicy[Any],
    cluster: Cluster,
    *,
    intercept_s: FloatArray,
    slope_s: FloatArray,
    jitter: FloatArray | None = None,
    comm: AbstractComm | None = None,
) -> SimReport:
    """Return what ``policy`` makes of these workers, with a barrier at the end of every step.

    The policy sits in the very ``Planner`` that trains on rank 0: what it gets to see, and what
    becomes of its mistakes, is the same. Step k decides k + 1. Deterministic: the same arguments
    give the same report.

    Args:
        policy: by name or by value.
        cluster: global batch and bounds.
        intercept_s: fixed cost of a step for every worker, ``(world_size,)``.
        slope_s: cost of one sample, ``(num_steps, world_size)``.
        jitter: factors on the whole time, likewise; None is none.
        comm: what communication adds; None is nothing.

    Raises:
        ValueError: times of another shape, or out of range; a policy that breaks its contract.
    """
    workload = Workload(intercept_s, slope_s, jitter)
    workload.check(cluster)
    ends = NoComm() if comm is None else comm
    given = by_name(policy) if isinstance(policy, str) else policy
    planner = Planner(given, _job(cluster), warm_up_steps=0)

    shape = (workload.num_steps, workload.world_size)
    sizes, compute_s = np.empty(shape, np.int64), np.empty(shape)
    step_s, reasons = np.empty(workload.num_steps), []
    for step in range(workload.num_steps):
        sizes[step] = planner.plan.batch_size
        reasons.append(planner.plan.reason)
        compute_s[step] = workload.seconds(step, sizes[step])
        step_s[step] = ends.step_s(compute_s[step])
        reports = _reports(step, sizes[step], compute_s[step], cluster.global_batch_size)
        for event in planner.observe(reports, next_step=step + 1).events:
            if type(event).__name__ == "PolicyFailed":
                raise invalid(
                    "sim.run(policy=...)",
                    "keep the contract of policies in every step",
                    f"{type(given).__name__}, which failed in step {step}: {event}",
                    "Run `evenstep.testing.PolicyContract` on it.",
                )
    return SimReport(step_s, sizes, compute_s, tuple(reasons))


def oracle(
    cluster: Cluster,
    *,
    intercept_s: FloatArray,
    slope_s: FloatArray,
    jitter: FloatArray | None = None,
    comm: AbstractComm | None = None,
) -> FloatArray:
    """Return the step times, ``(num_steps,)``, of the plan that knows what nobody can.

    It knows every step's fixed costs and slopes beforehand, but not its jitter, which it suffers
    like everybody. The arguments are those of ``run``.
    """
    workload = Workload(intercept_s, slope_s, jitter)
    workload.check(cluster)
    ends = NoComm() if comm is None else comm
    step_s = np.empty(workload.num_steps)
    best: IntArray | None = None
    for step, slope in enumerate(workload.slope_s):
        if best is None or not np.array_equal(slope, workload.slope_s[step - 1]):
            best = allocate(AffineTime(workload.intercept_s, slope), cluster)
        step_s[step] = ends.step_s(workload.seconds(step, best))
    return step_s


def _job(cluster: Cluster) -> Job:
    def each(sizes: IntArray) -> tuple[int, ...]:
        return tuple(sizes.tolist())

    bounds = Bounds(
        min=each(cluster.min_batch_size),
        max=each(np.maximum(cluster.max_batch_size, 1)),
        granularity=each(cluster.granularity),
    )
    return Job(cluster.world_size, cluster.global_batch_size, bounds=bounds)


def _reports(
    step: int, sizes: IntArray, compute_s: FloatArray, global_batch_size: int
) -> list[Report]:
    pairs = zip(sizes.tolist(), compute_s.tolist(), strict=True)
    return [Report(step, size, global_batch_size, seconds, 0.0) for size, seconds in pairs]
