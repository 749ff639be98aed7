"""From the sizes of a full step to all that ranks are told."""

from __future__ import annotations

from .._types import Cluster, IntArray
from ._job import Job
from ._plan import Plan
from ._tail import split_tail


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
    max_forward = job.max_forward(batch_size, caps)
    return Plan(
        epoch=epoch,
        first_step=first_step,
        batch_size=tuple(batch_size.tolist()),
        tail=None if tail is None else tuple(tail.tolist()),
        max_forward=None if max_forward is None else tuple(max_forward.tolist()),
        granularity=tuple(cluster.granularity.tolist()) if job.cuts else None,
        reason=reason,
    )
