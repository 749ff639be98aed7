"""Who plans a simulated run: a policy in the trainer's own planner, or an oracle."""

from __future__ import annotations

import abc
from typing import Any

import numpy as np

from .._planner import Bounds, Cost, CostPlanner, Job, Plan, Planner, Report, Work, assign
from .._types import Cluster, FloatArray, IntArray, StepTimings
from ..events import PolicyFailed
from ..exceptions import invalid
from ..policies import AbstractPolicy, Auto, Equal
from ..solve._allocate import allocate
from ._sample_workload import SampleWorkload
from ._workload import AbstractWorkload


class AbstractDecider(abc.ABC):
    """Gives the plan of a step, and is informed how it went."""

    @abc.abstractmethod
    def plan(self, step: int, members: IntArray) -> tuple[IntArray, str]:
        """Return the members' batch sizes, ``(num_members,)``, and why they are such."""

    @abc.abstractmethod
    def observe(self, step: int, batch_size: IntArray, compute_s: FloatArray) -> None:
        """Take in what the members computed in ``step``, both ``(num_members,)``."""


class PolicyDecider(AbstractDecider):
    """A policy, planned for by the ``Planner`` that trains on rank 0.

    When workers leave or join, another planner takes over for those who are there, as after an
    elastic restart: it takes up what the last one has learnt, as far as the workers are the same.

    Args:
        policy: decides.
        cluster: of all workers of the run.
        elastic: whether workers leave or join.
    """

    def __init__(self, policy: AbstractPolicy[Any], cluster: Cluster, *, elastic: bool) -> None:
        self._policy, self._cluster, self._elastic = policy, cluster, elastic
        self._members = np.empty(0, np.int64)
        self._planner: Planner | None = None

    def plan(self, step: int, members: IntArray) -> tuple[IntArray, str]:
        if self._planner is None or not np.array_equal(members, self._members):
            self._planner = self._restarted(step, members)
            self._members = members
        plan = self._planner.plan
        return np.array(plan.batch_size, np.int64), plan.reason

    def observe(self, step: int, batch_size: IntArray, compute_s: FloatArray) -> None:
        assert self._planner is not None
        ran_under = self._planner.plan
        timings = StepTimings(batch_size, compute_s, np.zeros(len(batch_size)))
        for event in self._planner.observe_timings(step, timings, next_step=step + 1):
            if isinstance(event, PolicyFailed):
                raise invalid(
                    "sim.run(policy=...)",
                    "keep the contract of policies in every step",
                    f"{type(self._policy).__name__}, which failed in step {step}: {event}",
                    "Run `evenstep.testing.PolicyContract` on it.",
                )
        if self._elastic:  # what a restart goes by; nothing else reads it here
            total = int(batch_size.sum())
            pairs = zip(batch_size.tolist(), compute_s.tolist(), strict=True)
            reports = [Report(step, size, total, seconds, 0.0) for size, seconds in pairs]
            self._planner.account(reports, ran_under)

    def _restarted(self, step: int, members: IntArray) -> Planner:
        planner = Planner(
            self._policy, job_of(among(self._cluster, members, step)), warm_up_steps=0
        )
        if self._planner is not None:
            place = {int(worker): rank for rank, worker in enumerate(self._members)}
            former = np.array([place.get(int(worker), -1) for worker in members], np.int64)
            planner.restore(self._planner.learnt(), former)
        return planner


class OracleDecider(AbstractDecider):
    """The best split for what every step will take, luck apart."""

    def __init__(self, workload: AbstractWorkload, cluster: Cluster) -> None:
        self._workload, self._cluster = workload, cluster
        self._last = -2, np.empty(0, np.int64)

    def plan(self, step: int, members: IntArray) -> tuple[IntArray, str]:
        before, best = self._last
        if before != step - 1 or not self._workload.repeats(step):
            best = allocate(self._workload.times(step), among(self._cluster, members, step))
        self._last = step, best
        return best, "foreseen"

    def observe(self, step: int, batch_size: IntArray, compute_s: FloatArray) -> None:
        """Nothing to be learnt."""


def among(cluster: Cluster, members: IntArray, step: int) -> Cluster:
    """Return the cluster of the workers that are there.

    Raises:
        ValueError: their bounds leave no way to split the global batch.
    """
    if len(members) == cluster.world_size:
        return cluster
    try:
        return Cluster(
            len(members),
            cluster.global_batch_size,
            cluster.min_batch_size[members],
            cluster.max_batch_size[members],
            cluster.granularity[members],
        )
    except ValueError as error:
        raise invalid(
            "sim.run(cluster=...)",
            f"leave a way to split among the {len(members)} workers of step {step}",
            str(error),
            "Widen the bounds, or keep more workers.",
        ) from error


def job_of(cluster: Cluster) -> Job:
    """Return what a planner knows of ``cluster``."""

    def each(sizes: IntArray) -> tuple[int, ...]:
        return tuple(sizes.tolist())

    bounds = Bounds(min=each(cluster.min_batch_size), granularity=each(cluster.granularity))
    most = each(cluster.max_batch_size)
    return Job(cluster.world_size, cluster.global_batch_size, bounds=bounds, most=most)


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

    def observe(self, step: int, owner: IntArray, compute_s: FloatArray) -> None:
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
