"""One set of running statistics from what each rank's local BatchNorm saw of the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase


def average_running_stats(
    modules: Iterable[nn.Module],
    count: float,
    total: Callable[[torch.Tensor], torch.Tensor],
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
