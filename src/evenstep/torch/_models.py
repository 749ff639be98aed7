"""What is asked of a model before it is balanced, and the hooks it gets."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ..exceptions import EvenstepWarning, invalid
from ._link import RunLink
from ._weighting import Backward, InertHook, OutputHook

Weighting = Literal["output", "loss"]


class BalancedModel:
    """A user's model with the balancer's hooks on it; the model object stays the user's own.

    Args:
        module: the model; wrapped into DDP by the caller where it was plain.
        backward: told of every backward.
        weight: gives the weight of the forward under way.
        weighting: ``"output"`` scales what the model returns, ``"loss"`` leaves that to
            ``Balancer.weight``.
    """

    def __init__(
        self,
        module: nn.Module,
        backward: Backward,
        weight: Callable[[], float | None],
        weighting: Weighting,
    ) -> None:
        self.module = module
        self._handles: list[RemovableHandle] = []
        if weighting == "output":
            hook = OutputHook(weight, backward)
            self._handles += [
                module.register_forward_pre_hook(hook.before, with_kwargs=True),
                module.register_forward_hook(hook, with_kwargs=True),
            ]

    def time_buffers(self, link: RunLink) -> None:
        """Keep DDP's broadcast of buffers, which waits for rank 0, out of the compute time."""
        module = self.module
        if not isinstance(module, DistributedDataParallel) or not module.broadcast_buffers:
            return
        if not any(True for _ in module.module.buffers()):
            return

        begun: list[Any] = []
        self._handles += [
            layer.register_forward_pre_hook(BufferHook(link, begun, entry=entry), prepend=True)
            for layer, entry in ((module, True), (module.module, False))
        ]

    def release(self) -> None:
        """Take the hooks off: the model is a plain one again, and nothing keeps it alive."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def no_sync(self) -> AbstractContextManager[Any] | None:
        """Return DDP's context in which a backward does not synchronise; None for others."""
        if isinstance(self.module, DistributedDataParallel):
            return self.module.no_sync()
        return None


class BufferHook:
    """Measures from DDP's entry to the inner module's: the broadcast of buffers lies between.

    Two of them, one at each place, share what the first has noted. Objects and not methods, so
    that a copy of the model gets something inert instead.

    Args:
        link: the run.
        begun: the mark at the entry; emptied at the inner module's.
        entry: whether this one sits at the entry.
    """

    def __init__(self, link: RunLink, begun: list[Any], *, entry: bool) -> None:
        self._link = link
        self._begun = begun
        self._entry = entry

    def __reduce__(self) -> tuple[type[InertHook], tuple[()]]:
        return InertHook, ()  # copies and pickles of the model leave the run behind

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        """Note the entry, or leave the time since then out."""
        meter = self._link.meter()
        self._link.collective(entered=self._entry)
        if self._entry:
            self._begun[:] = [] if meter is None else [meter.clock.mark()]
        elif meter is not None and self._begun:  # not where the inner module is called by itself
            meter.exclude(self._begun.pop(), meter.clock.mark())


def check_unprepared(module: nn.Module) -> None:
    """Raise if ``module``, or the model inside a DDP, carries the hooks already."""
    layers = [module, module.module if isinstance(module, DistributedDataParallel) else module]
    for layer in layers:
        if any(isinstance(hook, OutputHook) for hook in layer._forward_hooks.values()):
            raise invalid(
                "Balancer.prepare(model)",
                "be given each model once",
                f"{type(module).__name__} a second time, whose gradient would be weighted twice",
                "Keep the model that the first call returned.",
            )


def with_ddp(
    module: nn.Module, world_size: int, process_group: torch.distributed.ProcessGroup | None
) -> nn.Module:
    """Return ``module`` as it is if it averages gradients or is alone, else in a DDP."""
    if isinstance(module, DistributedDataParallel):
        _check_group(module, process_group)
        return module
    if world_size == 1:
        return module
    device = device_of(module)
    ids = [device.index] if device.type == "cuda" and device.index is not None else None
    return DistributedDataParallel(module, device_ids=ids, process_group=process_group)


def _check_group(
    module: DistributedDataParallel, process_group: torch.distributed.ProcessGroup | None
) -> None:
    """Raise unless the model averages over the very ranks among which batches are split."""
    theirs = torch.distributed.get_process_group_ranks(module.process_group)
    ours = torch.distributed.get_process_group_ranks(process_group or torch.distributed.group.WORLD)
    if theirs != ours:
        raise invalid(
            "Balancer.prepare(model)",
            f"average gradients over the balancer's ranks, {ours}",
            f"a DDP over {theirs}",
            "Give the same group to `Balancer(process_group=...)`.",
        )


def device_of(module: nn.Module) -> torch.device:
    """Return the device of the first parameter; a model without any has nothing to train."""
    for parameter in module.parameters():
        return parameter.device
    raise invalid(
        "Balancer.prepare(model)",
        "have parameters",
        f"{type(module).__name__} without any",
        "Prepare the model that is trained.",
    )


def has_local_batch_norm(module: nn.Module) -> bool:
    """Tell whether a layer normalises over the rank's own samples alone."""
    return any(
        isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm)
        for layer in module.modules()
    )


def warn_batch_norm(module: nn.Module) -> None:
    """Say what no weight can repair, and the remedy on this device."""
    if not has_local_batch_norm(module):
        return
    remedy = (
        "Convert it with `torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)` before DDP"
        if device_of(module).type == "cuda"
        else "Use GroupNorm instead: SyncBatchNorm does not run on a CPU"
    )
    warnings.warn(
        f"{type(module).__name__} has local BatchNorm, which normalises each rank's samples by "
        f"themselves: with uneven batches the result differs from the equal split, and no weight "
        f"repairs that. {remedy}. Every rank gets at least 2 samples meanwhile.",
        EvenstepWarning,
        stacklevel=4,
    )
