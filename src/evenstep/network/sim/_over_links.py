"""Training over simulated links: the planner of sizes beside that of shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..._planner import Planner
from ..._types import Cluster, FloatArray, IntArray, StepTimings
from ...events import Event
from ...exceptions import invalid
from ...policies import AbstractPolicy, by_name
from ...sim._deciders import job_of
from ...sim._workload import AbstractWorkload
from .._following._in_force import SharesInForce
from .._following._share_planner import SharePlanner
from .._plans._bandwidths import Links
from ._played import play_exchange
from ._shared_links import SharedLinksComm


@dataclass(frozen=True, slots=True, eq=False)
class OverLinksReport:
    """What became of a run that computed and exchanged.

    Attributes:
        step_s: seconds of every step, ``(num_steps,)``.
        batch_size: local batch sizes, ``(num_steps, world_size)``.
        plans: the plan of shares that each step ran under.
        events: all that the planners told, in order.
    """

    step_s: FloatArray
    batch_size: IntArray
    plans: tuple[SharesInForce, ...]
    events: tuple[Event, ...]


def run_over_links(
    policy: str | AbstractPolicy[Any],
    cluster: Cluster,
    workload: AbstractWorkload,
    links: Sequence[Links],
    shares: SharePlanner,
    *,
    overlap: float = 0.0,
    noise: float = 0.0,
    seed: int = 0,
) -> OverLinksReport:
    """Return what policies of sizes and of shares make of workers and links, side by side.

    The objects are those that train: ``Planner`` and ``SharePlanner``. A step lasts as
    ``SharedLinksComm`` has it, links are measured as in ``play_exchange``, and step k decides
    k + 1 of both. Deterministic: the same arguments give the same report, if the planners are new.

    Args:
        policy: of batch sizes, by name or by value.
        cluster: global batch and bounds.
        workload: what computing takes; all workers take part in all steps.
        links: what they carry in each step.
        shares: plans the shares; not used before.
        overlap: part of computing, at its end, during which gradients become ready, in [0, 1].
        noise: as for ``play_exchange``.
        seed: of the noise.

    Raises:
        ValueError: the numbers of workers or steps differ.
    """
    _check(cluster, workload, links, shares)
    given = by_name(policy) if isinstance(policy, str) else policy
    sizes, generator = Planner(given, job_of(cluster), warm_up_steps=0), np.random.default_rng(seed)
    aggregation = shares.aggregation
    log: list[tuple[float, IntArray, SharesInForce]] = []
    events: list[Event] = []
    for step, now in enumerate(links):
        plan = shares.plan
        batch_size = np.array(sizes.plan.batch_size, np.int64)
        compute_s = workload.seconds(step, batch_size)
        split = plan.shares if plan.is_shared(step - plan.first_step) else None
        step_s = SharedLinksComm(aggregation, now, split, overlap)(compute_s)
        done = play_exchange(
            aggregation, now, split, plan_epoch=plan.epoch, noise=noise, generator=generator
        )
        done = replace(done, exchange_s=max(step_s - float(compute_s.max()), 1e-9))
        log.append((step_s, batch_size, plan))
        events += shares.observe(step, done, next_step=step + 1).events
        timings = StepTimings(batch_size, compute_s, np.zeros(len(batch_size)))
        events += sizes.observe_timings(step, timings, next_step=step + 1).events
    seconds, batches, plans = zip(*log, strict=True)
    return OverLinksReport(np.array(seconds), np.array(batches), plans, tuple(events))


def _check(
    cluster: Cluster, workload: AbstractWorkload, links: Sequence[Links], shares: SharePlanner
) -> None:
    sizes = cluster.world_size, workload.world_size, shares.aggregation.num_workers
    if len(set(sizes)) > 1:
        rule, remedy = "have as many workers as the times and the aggregation", "Give one of each."
        raise invalid("run_over_links(cluster=...)", rule, sizes, remedy)
    if not 1 <= len(links) <= workload.num_steps:
        rule = f"be of 1 to {workload.num_steps} steps, as the workload is"
        raise invalid("run_over_links(links=...)", rule, len(links), "Repeat them per step.")
