"""Plans by cost in a simulated run, carried out on all ranks at once."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._planner import Cost, CostPlanner, Job, Plan, Report, Work, assign
from .._types import Cluster, FloatArray, IntArray
from ..exceptions import invalid
from ..policies import AbstractPolicy, Auto, Equal
from ._sample_workload import SampleWorkload


class CostDecider:
    """The ``CostPlanner`` that trains on rank 0, and what every rank makes of its plans.

    It learns from a step while the next one runs, so step k decides k + 2.

    Args:
        policy: as in ``Balancer(cost=...)``: ``Auto``, or ``Equal``, which balances lengths alone.
        cluster: the global batch; with costs there are no bounds.
        workload: whose samples are assigned.
        cost: what ``Balancer(cost=...)`` would be given.

    Attributes:
        is_one_for_all: whether all samples cost the same.

    Raises:
        ValueError: another policy, bounds, or a cost that is not about these samples.
    """

    def __init__(
        self, policy: AbstractPolicy[Any], cluster: Cluster, workload: SampleWorkload, cost: Any
    ) -> None:
        _check(policy, cluster)
        given = Cost.given(cost)
        assert given is not None
        if given.padded is None:
            given = Cost(given.of, workload.padded, given.max_size, given.max_samples)
        if isinstance(given.of, str) or given.is_capped or given.padded != workload.padded:
            rule = "be lengths by index, with no caps, and padded as the workload is"
            remedy = "Give `workload.lengths`."
            raise invalid("sim.run(cost=...)", rule, given, remedy)
        self.is_one_for_all = given.is_one_for_all
        self._workload = workload
        self._costs = given.table(workload.lengths)
        self._planner = CostPlanner(
            Job(cluster.world_size, cluster.global_batch_size),
            self._costs,
            kinds=[0] * cluster.world_size,
            by_speed=not isinstance(policy, Equal),
        )
        self._plans = [self._planner.plan]  # the newest last

    def plan(self, step: int) -> tuple[IntArray, str]:
        """Return the owner of every sample of a step, and why."""
        plan = self._in_force(step)
        ranks = np.arange(self._workload.world_size)
        if plan.costs is None:
            return np.repeat(ranks, plan.batch_size), plan.reason
        found = assign(self._costs, self._features(step), plan.costs.workers())
        return found.owner, plan.reason

    def tell(self, step: int, owner: IntArray, compute_s: FloatArray) -> None:
        """Take in what the ranks computed in ``step``, and for how long, ``(world_size,)``."""
        plan, features = self._in_force(step), self._features(step)
        world_size = self._workload.world_size
        equal = np.array_split(features, world_size)
        counted = np.split(features, np.cumsum(plan.batch_size)[:-1])
        reports = []
        for rank, took_s in enumerate(compute_s.tolist()):
            own = features[owner == rank]
            work = Work(*(self._costs.total([part]) for part in (own, equal[rank], counted[rank])))
            wall_s = float(compute_s.max())
            reports.append(Report(step, len(own), len(owner), took_s, 0.0, wall_s, work=work))
        self._planner.observe(reports, next_step=step + 1)
        self._planner.catch_up(next_step=step + 2)
        if self._planner.plan is not self._plans[-1]:
            self._plans.append(self._planner.plan)

    def _features(self, step: int) -> IntArray:
        return self._costs.features(self._workload.order[step])

    def _in_force(self, step: int) -> Plan:
        return next(plan for plan in reversed(self._plans) if plan.first_step <= step)


def _check(policy: AbstractPolicy[Any], cluster: Cluster) -> None:
    if not isinstance(policy, Auto | Equal):
        raise invalid(
            "sim.run(policy=...)",
            "be 'auto' or 'equal' with a cost",
            type(policy).__name__,
            "Others count samples.",
        )
    free = Cluster(cluster.world_size, cluster.global_batch_size)
    if any(
        not np.array_equal(getattr(cluster, name), getattr(free, name))
        for name in ("min_batch_size", "max_batch_size", "granularity")
    ):
        remedy = "Give `Cluster(world_size, global_batch_size)`."
        raise invalid("sim.run(cluster=...)", "have no bounds with a cost", cluster, remedy)
