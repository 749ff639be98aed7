"""Run a policy on simulated workers, and the perfect-foresight oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .._types import Cluster, FloatArray
from ..claims import AbstractScheme, Bsp
from ..exceptions import invalid
from ..policies import AbstractPolicy, by_name
from ._deciders import AbstractDecider, CostDecider, OracleDecider, PolicyDecider
from ._rounds import Floor, Log, SimReport, as_planned
from ._sample_workload import SampleWorkload
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
    """Return the report of a simulated run with ``policy``.

    The policy runs in the same ``Planner`` as in training, which shows it the same things and
    treats its mistakes in the same way. Step k decides k + 1. The same arguments give the same
    report.

    With ``cost``, the ``CostPlanner`` of training assigns samples by lengths and speeds, or, under
    the policy ``"equal"``, by lengths alone. Step k then decides k + 2.

    When workers leave or join, the policy starts again with those that are there, as after an
    elastic restart: from its own state if they are the same, from the known times if all were
    measured, otherwise anew. The restart itself takes no time.

    Args:
        policy: by name or by value.
        cluster: global batch, and bounds of all workers of the run.
        workload: the times of computing, and which workers are there.
        scheme: how a plan is carried out; by default as planned.
        comm: a function from the times at which workers end computing, ``(world_size,)``, to the
            seconds of the step. None takes the slowest worker's time, without communication.
        cost: the argument of ``Balancer(cost=...)``, for a ``Scenario.with_lengths``: its
            ``lengths``, or other ones, to see what wrong lengths do. None counts samples.

    Raises:
        ValueError: the numbers of workers differ; the workers of a step cannot hold the global
            batch; the policy breaks its contract; or the cost does not suit the other arguments.
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

    It knows every step's times beforehand, but not the jitter, which affects it like others. The
    arguments are those of ``run``. A scheme that moves samples inside a step can be faster than
    this plan. The oracle counts samples: if they have lengths it knows their mean, so compare with
    ``lower_bound_s`` of the workload instead.
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
