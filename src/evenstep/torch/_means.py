"""Means over all ranks that are exact for uneven batches: of a value, of running statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from .._diagnosis import Phase
from .._private_torch import RunningNorm
from ._exchange._side_group import Alone, SideGroup
from ._model._models import BalancedModel
from ._step._tracker import StepTracker


def mean_over(
    side: SideGroup | Alone | None,
    steps: StepTracker,
    value: float | torch.Tensor,
    count: float | None,
) -> float:
    """Return the mean of every rank's ``value``, each over ``count``; NaN over nothing. Collective.

    A value over nothing is left out, also where it is none.

    Args:
        side: the workers; None before ``prepare``.
        steps: know what the one under way has.
        value: this rank's mean.
        count: over what; None is the units of the step under way.

    Raises:
        RuntimeError: no step is under way whose units could be the count.
    """
    if count is None:
        count = steps.num_units
    if count is None or side is None:
        raise RuntimeError(
            "No training step is under way, so it is unknown how many samples the value is a "
            "mean of: give `balancer.mean(value, count=...)`, after `prepare`."
        )
    steps.report_now()
    given = value.detach() if isinstance(value, torch.Tensor) else value
    number = float(given) if count else 0.0
    with steps.timed(Phase.MEAN):
        sums = side.sum(torch.tensor([number * count, count], dtype=torch.float64))
    total, samples = sums.tolist()
    return float(total / samples) if samples else float("nan")


def average_statistics(
    side: SideGroup | Alone | None,
    steps: StepTracker,
    models: Sequence[BalancedModel],
    num_averaged: int,
) -> int:
    """Average running statistics of BatchNorm, weighted by the samples that each rank's stand for.

    Those since the last call where each rank keeps its own; those of the newest step where DDP
    hands rank 0's to all at each forward. Layers in ``SyncBatchNorm`` hold the same on all
    ranks already, and come out as they were, up to rounding. Collective.

    Returns:
        How many samples of this rank are dealt with by now; ``num_averaged`` were before.

    Raises:
        RuntimeError: there is no ``side``, before ``prepare`` or after ``close``.
    """
    if side is None:
        raise RuntimeError("Nothing to average: call it between `prepare` and `close`.")
    if side.world_size == 1:
        return num_averaged
    steps.report_now()
    seen, newest = steps.num_samples_seen
    for broadcast, count in ((True, newest), (False, seen - num_averaged)):
        own = (model.module for model in models if model.broadcasts_buffers == broadcast)
        buffers = [buffer for module in own for buffer in _running(module)]
        with steps.timed(Phase.MEAN):
            _average(buffers, count, side)
    return seen


def _average(buffers: Sequence[torch.Tensor], count: float, side: SideGroup | Alone) -> None:
    """Replace buffers by their mean over ranks; where all counts are 0, leave them as they are."""
    if not buffers:
        return
    parts = [buffer.detach().double().cpu().flatten() for buffer in buffers]
    mine = torch.cat([torch.ones(1, dtype=torch.float64), *parts])
    sums = side.sum(count * mine if count else torch.zeros_like(mine))  # a rank's NaN counts not
    if not float(sums[0]):
        return
    means = (sums[1:] / sums[0]).split([len(part) for part in parts])  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for buffer, mean in zip(buffers, means, strict=True):
            buffer.copy_(mean.view_as(buffer))


def _running(module: nn.Module) -> Iterator[torch.Tensor]:
    for layer in module.modules():
        if isinstance(layer, RunningNorm):
            yield from (
                each for each in (layer.running_mean, layer.running_var) if each is not None
            )
