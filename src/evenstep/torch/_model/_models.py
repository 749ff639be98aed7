"""What is asked of a model before it is balanced, and the hooks it gets."""

from __future__ import annotations

import warnings
from collections import deque
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from ...exceptions import EvenstepWarning, invalid
from ._compile_watch import CompileWatch
from ._compiled import (
    Surround,
    check_compiled,
    compiled_parts,
    ddp_of,
    hooks_on,
    inside,
    is_compiled,
)
from ._forward_hook import ForwardHook
from ._fsdp import Shards, check_fsdp, fsdp_device, fsdp_layers, refuse_other_kinds
from ._nested import NestedBackwards
from ._protocols import ModelSession
from ._weighting import Backward, InertHook

Weighting = Literal["output", "loss"]


class BalancedModel:
    """A user's model with the balancer's hooks on it; the model object stays the user's own.

    Args:
        module: the model; wrapped into DDP by the caller where it was plain.
        backward: told of every backward.
        session: has the steps, which know to which batch a forward belongs.
        weighting: ``"output"`` scales what the model returns, ``"loss"`` leaves that to
            ``Balancer.weight``.
        watch: told of every forward, and marks what compiled models are given.
        number: the model's, in the order of ``prepare``.
    """

    def __init__(
        self,
        module: nn.Module,
        backward: Backward,
        session: ModelSession,
        weighting: Weighting,
        watch: CompileWatch,
        *,
        number: int,
    ) -> None:
        self.module = module
        self.ddp = ddp_of(module)
        self.shards = Shards(layers) if (layers := fsdp_layers(module)) else None
        self._nested: NestedBackwards | None = None
        self._watch = watch
        self._outer = Surround(module)
        self._inner: Surround | None = None  # what DDP wraps, if its buffers are timed
        # Whether DDP has broadcast its buffers since this was last cleared; one entry says it.
        self.broadcasts: deque[None] = deque(maxlen=1)
        hook = ForwardHook(
            session, backward, model=number, weighs=weighting == "output", reduces=self._reduces
        )
        self._outer.before(hook.before, first=True)
        # Together with ours where nothing is compiled: calling a hook takes as long as it does.
        self._outer.before(watch.enter, first=not is_compiled(module))
        self._outer.after(watch.leave)
        self._outer.after(hook)
        self._parts = [Surround(part) for part in compiled_parts(module) if part is not self.module]
        for part in self._parts:
            part.before(watch.mark)
        watch.marks |= is_compiled(module)
        watch.has_parts |= bool(self._parts)
        self.place()

    def time_buffers(self, session: ModelSession) -> None:
        """Keep DDP's broadcast of buffers, which waits for rank 0, out of the compute time."""
        ddp = self.ddp
        if ddp is None or not ddp.broadcast_buffers:
            return
        if not any(True for _ in ddp.module.buffers()):
            return

        begun: list[Any] = []
        self._inner = _at(self._parts, ddp.module) or Surround(ddp.module)
        self._outer.before(BufferHook(session, begun, entry=True), first=True)
        done = BufferHook(session, begun, entry=False, broadcasts=self.broadcasts)
        self._inner.before(done, first=True)
        self.place()

    def place(self) -> None:
        """Put the hooks where they belong: a model may be compiled after it was prepared."""
        if self.ddp is not None and self.ddp.static_graph:
            check_compiled(self.module)
        self._outer.place()
        if self._inner is not None:
            self._inner.place(traced=is_compiled(self.module))
        for part in self._parts:
            part.place()

    def time_nested(self, session: ModelSession, backward: Backward) -> None:
        """Take the end of own backward where backwards nest, before DDP's wait inside them.

        Not for FSDP2, whose time ends before the last backward, nor for compiled modules, in which
        nothing nests and a hook may cost a compilation.
        """
        if self.ddp is not None and self.shards is None and not self.compiles:
            self._nested = NestedBackwards(self.ddp.module, backward, session)

    @property
    def compiles(self) -> bool:
        """Whether the model, or a part of it, is compiled."""
        return bool(self._parts) or is_compiled(self.module)

    def _reduces(self) -> bool | None:
        """Tell whether the backward of a forward made now reduces gradients: DDP's own attribute.

        None for other wrappers: how a model is sharded does not tell.
        """
        return None if self.ddp is None else bool(self.ddp.require_backward_grad_sync)

    @property
    def broadcasts_buffers(self) -> bool:
        """Whether DDP hands rank 0's buffers to all ranks at each forward."""
        return self.ddp is not None and self.ddp.broadcast_buffers

    def release(self) -> None:
        """Take the hooks off: the model is a plain one again, and nothing keeps it alive."""
        for surround in (self._outer, self._inner, *self._parts):
            if surround is not None:
                surround.release()
        if self._nested is not None:
            self._nested.release()
        if self.shards is not None:
            self.shards.reshard()

    def no_sync(self) -> AbstractContextManager[Any] | None:
        """Return a context in which a backward does not synchronise; None for plain modules."""
        if self.shards is not None:
            return self.shards.no_sync()
        return None if self.ddp is None else self.ddp.no_sync()


def _at(surrounds: list[Surround], module: nn.Module) -> Surround | None:
    return next((surround for surround in surrounds if surround.module is module), None)


class BufferHook:
    """Measures from DDP's entry to the inner module's: the broadcast of buffers lies between.

    Two of them, one at each place, share what the first has noted. Objects and not methods, so
    that a copy of the model gets something inert instead.

    Args:
        session: has the steps.
        begun: the mark at the entry; emptied at the inner module's.
        entry: whether this one sits at the entry.
        broadcasts: gets an entry whenever the broadcast is over.
    """

    def __init__(
        self,
        session: ModelSession,
        begun: list[Any],
        *,
        entry: bool,
        broadcasts: deque[None] | None = None,
    ) -> None:
        self._session = session
        self._begun = begun
        self._entry = entry
        self._broadcasts = deque[None](maxlen=1) if broadcasts is None else broadcasts

    def __reduce__(self) -> tuple[type[InertHook], tuple[()]]:
        return InertHook, ()  # copies and pickles of the model leave the run behind

    def __call__(self, module: nn.Module, inputs: Any, keywords: Any = None) -> None:
        """Note the entry, or leave the time since then out."""
        steps = self._session.steps
        meter = steps.open_meter
        steps.collective(entered=self._entry)
        if not self._entry:
            self._broadcasts.append(None)
        if self._entry:
            self._begun[:] = [] if meter is None else [meter.clock.mark()]
        elif meter is not None and self._begun:  # not where the inner module is called by itself
            meter.exclude(self._begun.pop(), meter.clock.mark())


def check_unprepared(module: nn.Module) -> None:
    """Raise if ``module``, or the model inside a DDP, carries the hooks already."""
    ddp = ddp_of(module)
    for layer in (module, inside(module), module if ddp is None else ddp.module):
        if any(isinstance(hook, ForwardHook) for hook in hooks_on(layer)):
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
    device = device_of(module)  # or there is nothing to train
    if world_size > 1:
        refuse_other_kinds(module)
        _refuse_ddp_inside(module)
    if fsdp_layers(module):
        check_fsdp(module, process_group)
        return module
    if (ddp := ddp_of(module)) is not None:
        _check_group(ddp, process_group)
        return module
    if world_size == 1:
        return module
    ids = [device.index] if device.type == "cuda" and device.index is not None else None
    return DistributedDataParallel(module, device_ids=ids, process_group=process_group)


def _refuse_ddp_inside(module: nn.Module) -> None:
    """Raise if a part of ``module`` averages gradients for itself: they would be averaged twice."""
    outer = ddp_of(module)
    for name, part in module.named_modules():
        if isinstance(part, DistributedDataParallel) and part is not outer:
            raise invalid(
                "Balancer.prepare(model)",
                "be a DDP as a whole, or have none inside",
                f"{type(module).__name__} with a DDP at `{name}`",
                f"Prepare that one: `balancer.prepare(model.{name}, loader)`. What is around it "
                "stays as it is.",
            )


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
            "Give the same group to `Balancer(process_group=...)`, or, with servers, wrap it into "
            "`DDP(model, process_group=balancer.workers)`.",
        )


def device_of(module: nn.Module) -> torch.device:
    """Return where ``module`` computes; a model without parameters has nothing to train."""
    if (device := fsdp_device(module)) is not None:
        return device
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
        f"{type(module).__name__} has local BatchNorm, which normalizes each rank's samples "
        f"separately: with uneven batches the result differs from the equal split, and no weight "
        f"repairs that. {remedy}. Until then, every rank gets at least 2 samples, and "
        f"`balancer.average_buffers()` makes one set of running statistics for evaluation.",
        EvenstepWarning,
        stacklevel=4,
    )
