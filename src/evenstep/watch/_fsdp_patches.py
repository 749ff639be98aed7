"""The same for sharded models: FSDP2, and FSDP1 as far as it goes."""

from __future__ import annotations

from typing import Any

from .._private_torch import (
    FSDP2_GATHER,
    FSDP2_GROUP,
    FSDP2_INIT,
    FSDP2_POST_FORWARD,
    FSDP2_ROOT_PRE_FORWARD,
    FSDP2_STATE,
    FSDP2_WAITS,
    fsdp2_device,
    fsdp2_is_root,
)
from ._call_sites import frames_from
from ._torch_patches import Current, Hearing, Patches, device_of, meeting, watched_forward

FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"


def patch_fsdp(patches: Patches) -> None:
    """Have sharded models heard of, once what they are made by is loaded."""

    def fsdp2(module: Any) -> None:
        patches.put_maker(module.FSDPState, FSDP2_INIT, _made)
        patches.put(module.FSDPState, FSDP2_ROOT_PRE_FORWARD, _entered)
        patches.put(module.FSDPState, FSDP2_POST_FORWARD, _left)

    def fsdp1(module: Any) -> None:
        patches.put_maker(module.FullyShardedDataParallel, "__init__", _made_fsdp1)
        patches.put(module.FullyShardedDataParallel, "forward", watched_forward)

    def waits(module: Any) -> None:
        patches.put(module.FSDPParamGroup, FSDP2_GATHER, _gathering)
        for name in FSDP2_WAITS:
            patches.put(module.FSDPParamGroup, name, meeting)

    patches.when_loaded(FSDP2_STATE, fsdp2)
    patches.when_loaded(FSDP2_GROUP, waits)
    patches.when_loaded(FSDP1, fsdp1)


def _gathering(before: Any, hearing: Hearing) -> Any:
    """Return a method that waits on a CPU alone."""
    waiting = meeting(before, hearing)

    def unshard(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (waiting if self.device.type == "cpu" else before)(self, *args, **kwargs)

    return unshard


def _made(before: Any, current: Current) -> Any:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs)
        if (watch := current()) is not None:
            watch.model_made("FSDP2", "fully_shard", fsdp2_device(self), frames_from(1))

    return init


def _entered(before: Any, hearing: Hearing) -> Any:
    def root_pre_forward(self: Any, module: Any, args: Any, kwargs: Any) -> Any:
        log, was_root = hearing(), fsdp2_is_root(self)
        result = before(self, module, args, kwargs)
        if log is not None and not was_root and fsdp2_is_root(self):
            log.guard(log.forward_begins, module, (args, kwargs) if kwargs else args)
        return result

    return root_pre_forward


def _left(before: Any, hearing: Hearing) -> Any:
    def post_forward(self: Any, module: Any, inputs: Any, output: Any) -> Any:
        log, was_root = hearing(), fsdp2_is_root(self)
        result = before(self, module, inputs, output)
        if log is not None and was_root and not fsdp2_is_root(self):
            log.guard(log.forward_ends, result)
        return result

    return post_forward


def _made_fsdp1(before: Any, current: Current) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs)
        if (watch := current()) is not None:
            name = "FullyShardedDataParallel"
            watch.model_made("FSDP1", name, device_of(self), frames_from(1))
            watch.mixes()

    return __init__
