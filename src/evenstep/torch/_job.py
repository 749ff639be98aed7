"""What a run plans for, from the models and loaders that were prepared for it."""

from __future__ import annotations

from collections.abc import Sequence

from ..exceptions import invalid
from ..planner import Bounds, Job
from ._data.loaders._base import AbstractStepLoader
from ._data.loaders._stream import StreamLoader
from ._model._models import BalancedModel, has_local_batch_norm


def job_of(
    models: Sequence[BalancedModel],
    loaders: Sequence[AbstractStepLoader],
    bounds: Bounds,
    *,
    world_size: int,
    global_batch_size: int,
    cuts: bool,
    min_forwards: int,
) -> Job:
    """Return what is planned for, with the smallest local batches that the models can take.

    Local BatchNorm cannot normalise a single sample, and a single sample costs a compiled model a
    graph of its own: both get at least two, where the global batch has them.

    Args:
        models: all that are trained, perhaps none yet.
        loaders: used in turn, at least one.
        bounds: the user's limits.
        world_size: number of workers.
        global_batch_size: samples of a full step.
        cuts: whether the loop takes micro-batches.
        min_forwards: fewest forwards of a rank in a step.

    Raises:
        ValueError: no split is possible. Here on every rank, rather than later on rank 0 alone.
    """
    tail_size, smallest, tail_smallest = loaders[0].tail_batch_size or 0, 1, 0
    has_norm = any(has_local_batch_norm(model.module) for model in models)
    compiles = any(model.compiles for model in models)
    if world_size > 1 and (has_norm or compiles):
        smallest = min(2, global_batch_size // world_size) * min_forwards
        tail_smallest = 2 if (has_norm and tail_size) or tail_size >= 2 * world_size else 0
    if world_size > 1 and has_norm:
        _check_full_steps(loaders[-1])
        _check_tail(tail_size, world_size, bounds)
    job = Job(
        world_size=world_size,
        global_batch_size=global_batch_size,
        tail_size=tail_size,
        bounds=bounds,
        smallest=smallest,
        tail_smallest=tail_smallest,
        cuts=cuts,
        min_forwards=min_forwards,
    )
    job.cluster(job.caps())
    return job


def _check_full_steps(loader: AbstractStepLoader) -> None:
    """Raise for a model with local BatchNorm on a stream whose steps may have too few samples."""
    if isinstance(loader, StreamLoader) and not loader.drop_last:
        raise invalid(
            "Balancer.prepare(loader, stream=...)",
            "have full steps only, for the model's BatchNorm",
            "a stream that may end with fewer than 2 samples for a rank",
            "Set `DataLoader(drop_last=True)`, or use GroupNorm.",
        )


def _check_tail(tail_size: int, world_size: int, bounds: Bounds) -> None:
    """Raise if the short last step is too short for a model with local BatchNorm.

    It needs 2 samples on every rank, and a stand-in would enter its statistics. Where every
    forward has the same number, it needs one whole forward on every rank, and no single sample
    in one.
    """
    fixed = bounds.forward_size if bounds.vary == "count" else None
    each = max(2, fixed or 2)
    lonely = fixed is not None and tail_size % fixed == 1
    if 0 < tail_size < each * world_size or (tail_size and lonely):
        raise invalid(
            "Balancer.prepare(loader)",
            f"have {each} samples for each of {world_size} ranks in its last step, and none by "
            "itself, for the model's BatchNorm",
            tail_size,
            "Set `DataLoader(drop_last=True)`, or use GroupNorm.",
        )
