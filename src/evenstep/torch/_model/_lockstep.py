"""Whether ranks have to make as many forwards: where a forward is a collective."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from ._compiled import ddp_of


def is_lockstep(asked: bool | None, modules: Iterable[nn.Module]) -> bool:
    """Return what was asked for; if that is None, whether ``modules`` need ranks in lockstep."""
    return forward_is_collective(modules) if asked is None else asked


def forward_is_collective(modules: Iterable[nn.Module]) -> bool:
    """Tell whether a forward of any of ``modules`` is a collective, in an evaluation too.

    FSDP gathers parameters in every forward. DDP broadcasts buffers in a forward that follows one
    with gradients: the first of an evaluation under ``torch.no_grad()``, and all without it.
    """
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    for module in modules:
        if (ddp := ddp_of(module)) is not None:
            if ddp.broadcast_buffers and any(True for _ in ddp.module.buffers()):
                return True
        elif any(
            isinstance(part, FSDPModule | FullyShardedDataParallel) for part in module.modules()
        ):
            return True
    return False
