"""Run a policy on simulated workers, and the plan that knows what they will do beside it."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._types import Cluster, FloatArray
from ..exceptions import invalid
from ..planner.claims import AbstractScheme, Bsp
from ..policies import AbstractPolicy, by_name
from ._comm import AbstractComm, NoComm
from ._deciders import AbstractDecider, OracleDecider, PolicyDecider
from ._floor import Floor
from ._log import Log
from ._report import SimReport
from ._workload import AbstractWorkload, Workload

BSP = Bsp()


def run(
    policy: str | AbstractPolicy[Any],
    cluster: Cluster,
    *,
    intercept_s: FloatArray,
    slope_s: FloatArray,
    jitter: FloatArray | None = None,
    scheme: AbstractScheme[Any] = BSP,
    comm: AbstractComm | None = None,
) -> SimReport:
    """Return what ``policy`` makes of these workers.

    The policy sits in the very ``Planner`` that trains on rank 0: what it gets to see, and what
    becomes of its mistakes, is the same. Step k decides k + 1. Deterministic: the same arguments
    give the same report.

    Args:
        policy: by name or by value.
        cluster: global batch and bounds.
        intercept_s: fixed cost of a step for every worker, ``(world_size,)``.
        slope_s: cost of one sample, ``(num_steps, world_size)``.
        jitter: factors on the whole time, likewise; None is none.
        scheme: what becomes of a plan while its step runs; by default it is carried out.
        comm: what communication adds; None is nothing.

    Raises:
        ValueError: times of another shape, or out of range; a policy that breaks its contract.
    """
    workload = Workload(intercept_s, slope_s, jitter)
    return run_on(policy, cluster, workload, scheme=scheme, comm=comm)


def run_on(
    policy: str | AbstractPolicy[Any],
    cluster: Cluster,
    workload: AbstractWorkload,
    *,
    scheme: AbstractScheme[Any] = BSP,
    comm: AbstractComm | None = None,
) -> SimReport:
    """Return what ``policy`` makes of any workload: curves, workers that leave and join, a trace.

    As ``run`` otherwise. Where the members change, the policy starts again with those who are
    there, as after an elastic restart: from its own state if all are the same, from the times
    known if all were measured, anew otherwise. The restart itself takes no time.

    Args:
        policy: by name or by value.
        cluster: global batch, and bounds of all workers of the run.
        workload: what computing takes, and who is there.
        scheme: as for ``run``.
        comm: as for ``run``.

    Raises:
        ValueError: the numbers of workers differ; those of a step cannot hold the global batch;
            a policy that breaks its contract.
    """
    _check_world(cluster, workload)
    given = by_name(policy) if isinstance(policy, str) else policy
    first = workload.members(0)
    elastic = any(
        not np.array_equal(workload.members(step), first) for step in range(workload.num_steps)
    )
    return _play(PolicyDecider(given, cluster, elastic=elastic), workload, scheme, comm)


def oracle(
    cluster: Cluster,
    *,
    intercept_s: FloatArray,
    slope_s: FloatArray,
    jitter: FloatArray | None = None,
    scheme: AbstractScheme[Any] = BSP,
    comm: AbstractComm | None = None,
) -> FloatArray:
    """Return the step times, ``(num_steps,)``, of the perfect-foresight oracle.

    It knows every step's fixed costs and slopes beforehand, but not its jitter, which it suffers
    like everybody. The arguments are those of ``run``; a scheme that moves samples inside a step
    can do better than this plan without one.
    """
    workload = Workload(intercept_s, slope_s, jitter)
    return oracle_on(cluster, workload, scheme=scheme, comm=comm)


def oracle_on(
    cluster: Cluster,
    workload: AbstractWorkload,
    *,
    scheme: AbstractScheme[Any] = BSP,
    comm: AbstractComm | None = None,
) -> FloatArray:
    """Return the step times of ``oracle`` on any workload, ``(num_steps,)``."""
    _check_world(cluster, workload)
    return _play(OracleDecider(workload, cluster), workload, scheme, comm).step_s


def _play(
    decider: AbstractDecider,
    workload: AbstractWorkload,
    scheme: AbstractScheme[Any],
    comm: AbstractComm | None,
) -> SimReport:
    """Run all rounds, one after the other."""
    floor, log, ends = Floor(workload, scheme), Log(workload), comm or NoComm()
    step = 0
    while step < workload.num_steps:
        members = workload.members(step)
        sizes, reason = decider.plan(step, members)
        done = floor.round(step, members, sizes)
        log.put(step, members, done, reason=reason, round_s=ends.step_s(done.end_s))
        step += len(done.batch_size)
        decider.tell(step - 1, done.shown_size, done.shown_s)
    return log.report()


def _check_world(cluster: Cluster, workload: AbstractWorkload) -> None:
    if cluster.world_size != workload.world_size:
        raise invalid(
            "sim.run(cluster=...)",
            f"have the {workload.world_size} workers of the times",
            cluster.world_size,
            "Give one column of times per worker.",
        )
