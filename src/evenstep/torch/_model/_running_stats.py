"""One set of running statistics from what each rank's local BatchNorm saw of the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from .._exchange._startup import Alone, SideGroup
from ._models import BalancedModel
from ._protocols import ModelSteps

Total = Callable[[torch.Tensor], torch.Tensor]


class RunningStats:
    """Knows which samples the running statistics of a run's models stand for."""

    def __init__(self) -> None:
        self._num_averaged = 0  # samples of this rank that were dealt with

    def average_over(
        self, side: SideGroup | Alone | None, steps: ModelSteps, models: Iterable[BalancedModel]
    ) -> None:
        """Average over the ranks of ``side`` what they have seen so far, by ``steps``. Collective.

        Raises:
            RuntimeError: there is no ``side``, before ``prepare`` or after ``close``.
        """
        if side is None:
            raise RuntimeError("Nothing to average: call it between `prepare` and `close`.")
        if side.world_size > 1:
            steps.report_now()
            self.average(models, *steps.num_samples_seen, side.sum)

    def average(
        self, models: Iterable[BalancedModel], seen: int, newest: int, total: Total
    ) -> None:
        """Give every rank the same, weighted by the samples that each rank's stand for.

        Those since the last call where each rank keeps its own; those of the newest step where
        DDP hands rank 0's to all at each forward.

        Args:
            models: those of the run.
            seen: samples that this rank trained on.
            newest: those of its newest step.
            total: returns the sum over ranks of a double-precision CPU tensor.
        """
        models = tuple(models)
        for broadcast, count in ((True, newest), (False, seen - self._num_averaged)):
            modules = [m.module for m in models if m.broadcasts_buffers == broadcast]
            average_running_stats(modules, count, total)
        self._num_averaged = seen


def average_running_stats(
    modules: Iterable[nn.Module],
    count: float,
    total: Total,
) -> None:
    """Replace running means and variances by their mean over ranks, weighted by ``count``.

    Nothing changes where all counts are 0. Layers in ``SyncBatchNorm`` hold the same on all ranks
    already, and come out as they were, up to rounding.

    Args:
        modules: the models, the same on every rank.
        count: samples that this rank's statistics stand for.
        total: returns the sum over ranks of a double-precision CPU tensor. Called once.
    """
    buffers = list(_running(modules))
    if not buffers:
        return
    parts = [buffer.detach().double().cpu().flatten() for buffer in buffers]
    mine = torch.cat([torch.ones(1, dtype=torch.float64), *parts])
    sums = total(count * mine if count else torch.zeros_like(mine))  # a rank's NaN counts not
    if not float(sums[0]):
        return
    means = sums[1:] / sums[0]
    sizes = [buffer.numel() for buffer in buffers]
    with torch.no_grad():
        parts = means.split(sizes)  # type: ignore[no-untyped-call]
        for buffer, mean in zip(buffers, parts, strict=True):
            buffer.copy_(mean.view_as(buffer))


def _running(modules: Iterable[nn.Module]) -> Iterable[torch.Tensor]:
    for module in modules:
        for layer in module.modules():
            if isinstance(layer, _NormBase):
                for buffer in (layer.running_mean, layer.running_var):
                    if buffer is not None:
                        yield buffer
