"""Run a policy on simulated workers, and the plan that knows what they will do beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .._types import Cluster, FloatArray
from ..claims import AbstractScheme, Bsp
from ..exceptions import invalid
from ..policies import AbstractPolicy, by_name
from ._cost_decider import CostDecider
from ._deciders import AbstractDecider, OracleDecider, PolicyDecider
from ._floor import Floor
from ._log import Log
from ._rounds import as_planned
from ._sample_workload import SampleWorkload
from ._sim_report import SimReport
from ._workload import AbstractWorkload

BSP = Bsp()
Comm = Callable[[FloatArray], float]


def run(
    policy: str | AbstractPolicy[Any],
    cluster: Cluster,
    workload: AbstractWorkload,
    *,
    scheme: AbstractScheme[Any] = BSP,
    comm: Comm | None = None,
    cost: Any = None,
) -> SimReport:
    """Return what ``policy`` makes of these workers.

    The policy sits in the very ``Planner`` that trains on rank 0: what it gets to see, and what
    becomes of its mistakes, is the same. Step k decides k + 1. Deterministic: the same arguments
    give the same report.

    With ``cost``, the ``CostPlanner`` of training assigns samples by lengths and speeds, or, under
    the policy ``"equal"``, by lengths alone. Step k decides k + 2 there.

    Where the members change, the policy starts again with those who are there, as after an
    elastic restart: from its own state if all are the same, from the times known if all were
    measured, anew otherwise. The restart itself takes no time.

    Args:
        policy: by name or by value.
        cluster: global batch, and bounds of all workers of the run.
        workload: what computing takes, and who is there.
        scheme: what becomes of a plan while its step runs; by default it is carried out.
        comm: the seconds of a step, by when each worker ends computing, ``(world_size,)``: with
            communication, more than the slowest's. None is the slowest's, and no communication.
        cost: what ``Balancer(cost=...)`` would be given, of a ``Scenario.with_lengths``: its
            ``lengths``, or others, to see what wrong ones do. None counts samples.

    Raises:
        ValueError: the numbers of workers differ; those of a step cannot hold the global batch;
            a policy that breaks its contract; a cost that does not go with the other arguments.
    """
    _check_world(cluster, workload)
    given = by_name(policy) if isinstance(policy, str) else policy
    if cost is not None:
        if not isinstance(workload, SampleWorkload) or scheme is not BSP:
            rule = "come with a workload that has lengths, and without a scheme"
            remedy = "Make one by `Scenario.with_lengths`."
            raise invalid("sim.run(cost=...)", rule, type(workload).__name__, remedy)
        by_cost = CostDecider(given, cluster, workload, cost)
        if not by_cost.is_one_for_all:  # then samples are counted, as in training
            return _play_by_cost(by_cost, workload, comm)
    first = workload.members(0)
    elastic = any(
        not np.array_equal(workload.members(step), first) for step in range(workload.num_steps)
    )
    return _play(PolicyDecider(given, cluster, elastic=elastic), workload, scheme, comm)


def oracle(
    cluster: Cluster,
    workload: AbstractWorkload,
    *,
    scheme: AbstractScheme[Any] = BSP,
    comm: Comm | None = None,
) -> FloatArray:
    """Return the step times, ``(num_steps,)``, of the perfect-foresight oracle.

    It knows every step's times beforehand, but not its jitter, which it suffers like the others.
    The arguments are those of ``run``; a scheme that moves samples inside a step can do better
    than this plan without one. It counts samples: of those with lengths it knows the mean, and
    ``lower_bound_s`` of their workload is what to compare with.
    """
    _check_world(cluster, workload)
    return _play(OracleDecider(workload, cluster), workload, scheme, comm).step_s


def _play(
    decider: AbstractDecider,
    workload: AbstractWorkload,
    scheme: AbstractScheme[Any],
    comm: Comm | None,
) -> SimReport:
    """Run all rounds, one after the other."""
    floor, log = Floor(workload, scheme), Log(workload)
    step = 0
    while step < workload.num_steps:
        members = workload.members(step)
        sizes, reason = decider.plan(step, members)
        done = floor.round(step, members, sizes)
        round_s = float(done.end_s.max()) if comm is None else comm(done.end_s)
        log.put(step, members, done, reason=reason, round_s=round_s)
        step += len(done.batch_size)
        decider.tell(step - 1, done.shown_size, done.shown_s)
    return log.report()


def _play_by_cost(decider: CostDecider, workload: SampleWorkload, comm: Comm | None) -> SimReport:
    """Run all steps with samples assigned one by one."""
    log, ranks = Log(workload), np.arange(workload.world_size)
    for step in range(workload.num_steps):
        owner, reason = decider.plan(step)
        compute_s = workload.assigned_s(step, owner)
        counts = np.bincount(owner, minlength=len(ranks))
        done = as_planned(compute_s[np.newaxis], counts, np.ones_like(counts))
        step_s = float(compute_s.max()) if comm is None else comm(done.end_s)
        log.put(step, ranks, done, reason=reason, round_s=step_s)
        decider.tell(step, owner, compute_s)
    return log.report()


def _check_world(cluster: Cluster, workload: AbstractWorkload) -> None:
    if cluster.world_size != workload.world_size:
        raise invalid(
            "sim.run(cluster=...)",
            f"have the {workload.world_size} workers of the times",
            cluster.world_size,
            "Give one column of times per worker.",
        )
    if isinstance(workload, SampleWorkload):
        total = workload.global_batch_size
        if cluster.global_batch_size != total:
            rule = f"have the {total} samples of the workload's steps"
            got, remedy = cluster.global_batch_size, "Give both the same."
            raise invalid("sim.run(cluster=...)", rule, got, remedy)
