"""Whether the samples of a run's steps can be up for claims."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._planner import ClaimSwitch, Job
from ..claims import Hybrid
from ..exceptions import invalid
from ..policies import AbstractPolicy, Auto
from ._options import Runtime


def claims_of(
    policy: AbstractPolicy[Any],
    job: Job,
    runtime: Runtime,
    *,
    counts_units: bool,
    has_peers: bool,
    has_streams: bool,
) -> ClaimSwitch | None:
    """Return what decides on claims; None where there are none.

    Args:
        policy: decides the sizes.
        job: what is planned for.
        runtime: says whether they are wanted.
        counts_units: whether the loss is a mean over something else than samples: then all ranks
            have to know all units before the first backward ends.
        has_peers: whether several ranks get the same batches, as under tensor parallelism.
        has_streams: whether samples come from an ``IterableDataset``, in the order they come in.

    Raises:
        ValueError: claims were asked for by ``Runtime(claims=Hybrid(...))``, and cannot be.
    """
    wanted = runtime.claims
    problem = _problem(job, counts_units=counts_units, has_peers=has_peers, has_streams=has_streams)
    if isinstance(wanted, Hybrid) and problem is not None:
        rule = "be used where every rank can take more micro-batches as it goes"
        raise invalid("Runtime(claims=Hybrid(...))", rule, *problem)
    if wanted == "off" or problem is not None or job.world_size == 1:
        return None
    if isinstance(wanted, Hybrid):
        return ClaimSwitch(wanted, adaptive=False)
    return ClaimSwitch(Hybrid(), adaptive=True) if _is_auto(policy) else None


def _problem(
    job: Job, *, counts_units: bool, has_peers: bool, has_streams: bool
) -> tuple[str, str] | None:
    """Return what stands against claims, and what to do about it; None if nothing does."""
    if not job.cuts:
        return "a loop over `loader`", "Loop over `loader.steps()` and its micro-batches."
    if job.bounds.max == "probe":
        return "`Bounds(max='probe')`", "Give `Bounds(max=...)` a number."
    if job.smallest > 1 and job.bounds.vary == "size":
        which = "a compiled model or local BatchNorm, to which sizes are not free"
        return which, 'Use `Bounds(vary="count")`, with forwards of one shape.'
    if len(np.unique(job.bounds.granularity)) > 1:
        which = f"different granularities, {job.bounds.granularity}"
        return which, "Give `Bounds(granularity=...)` one number."
    if counts_units:
        return "a unit other than samples", 'Use `Balancer(unit="samples")`.'
    if has_peers:
        return "ranks that share their batches", "Leave `claims` out."
    if has_streams or job.varies:
        which = (
            "an `IterableDataset`" if has_streams else "batches of a `batch_sampler`, of any size"
        )
        return which, "Use a data set with a length and `batch_size`, or leave `claims` out."
    return None


def _is_auto(policy: AbstractPolicy[Any]) -> bool:
    """Return whether it is ``Auto``, or a wrapper's inner policy is."""
    inner = getattr(policy, "policy", None)
    return isinstance(policy, Auto) or (inner is not None and _is_auto(inner))
