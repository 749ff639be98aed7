"""Sharded training: which ranks FSDP2 and DeepSpeed average over, and when counts may differ.

DeepSpeed's engine averages gradients itself, in whatever stage of ZeRO, and is not wrapped. Wrong,
and refused, where ranks other than the balanced ones are averaged over, and in a pipeline, whose
engine takes batches by itself. Of FSDP2:

Gathering a layer's parameters and scattering its gradients are collectives in the middle of
forward and backward, so ranks with different numbers of micro-batches would wait for each other
for ever. So all ranks make as many, of different sizes, and a step takes the memory that it would
take without evenstep. Where that cannot be (claims, ``vary="count"``), parameters are gathered
once, at the start of the step, kept whole until the last backward, and gradients are reduced in
that one alone. The price is the memory of full parameters.

Wrong, and refused, where a rank's gradients are not averaged over just the balanced ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..._private_torch import (
    after_forward,
    forget_gradients,
    fsdp_groups,
    has_own_collectives,
    is_whole,
    original_of,
)
from ...exceptions import invalid

# What an engine reduces with, for all of a process, and what of it waits for other ranks.
COMM, BACKEND = "deepspeed.comm.comm", "cdb"
CALLS = (
    "all_reduce",
    "all_reduce_coalesced",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_coalesced",
    "all_to_all_single",
    "broadcast",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
)


def is_engine(module: nn.Module) -> bool:
    """Return whether ``deepspeed.initialize`` made it."""
    kind = getattr(sys.modules.get("deepspeed"), "DeepSpeedEngine", None)
    return kind is not None and isinstance(module, kind)


def check_engine(engine: Any, process_group: torch.distributed.ProcessGroup | None) -> None:
    """Raise unless an engine averages its gradients over the balanced ranks alone.

    Args:
        engine: of DeepSpeed.
        process_group: the ranks among which batches are split; None is all of them.

    Raises:
        ValueError: it does not, or it is that of a pipeline; the message names the remedy.
    """
    if hasattr(engine, "train_batch") and hasattr(engine, "num_stages"):
        raise invalid(
            "Balancer.prepare(model)",
            "be trained batch by batch",
            f"a {type(engine).__name__}, whose `train_batch` takes batches by itself",
            "Train without pipeline stages, in any stage of ZeRO.",
        )
    check_ranks(
        torch.distributed.get_process_group_ranks(engine.data_parallel_group),
        process_group,
        "an engine that averages over",
        "Give its group to the balancer: `Runtime(process_group=engine.data_parallel_group)`.",
    )


def check_ranks(
    theirs: list[int],
    process_group: torch.distributed.ProcessGroup | None,
    what: str,
    remedy: str,
) -> None:
    """Raise unless ``what`` averages over the very ranks among which batches are split."""
    ours = torch.distributed.get_process_group_ranks(process_group or torch.distributed.group.WORLD)
    if sorted(theirs) != sorted(ours):
        rule = f"average gradients over the balancer's ranks, {ours}"
        raise invalid("Balancer.prepare(model)", rule, f"{what} {theirs}", remedy)


_FSDP1 = "FullyShardedDataParallel"
_OTHER_KIND = "Shard the model with `torch.distributed.fsdp.fully_shard` (FSDP2), or use DDP."


def fsdp_layers(module: nn.Module) -> list[Any]:
    """Return the modules on which ``fully_shard`` was called, the outermost first."""
    kind = _loaded("FSDPModule")
    return [] if kind is None else [part for part in module.modules() if isinstance(part, kind)]


def check_fsdp(module: nn.Module, process_group: torch.distributed.ProcessGroup | None) -> None:
    """Raise unless FSDP2 averages all gradients of ``module`` over the balanced ranks alone.

    Args:
        module: with at least one layer sharded by ``fully_shard``.
        process_group: the ranks among which batches are split; None is all of them.

    Raises:
        ValueError: it does not; the message names the remedy.
    """
    layers = fsdp_layers(module)
    if layers[0] not in (module, original_of(module)):
        raise invalid(
            "Balancer.prepare(model)",
            "be sharded as a whole",
            f"{type(module).__name__}, only parts of which are",
            "Call `fully_shard(model)` on the model itself too, after its layers: nothing averages "
            "the gradients of the rest.",
        )
    for group in (group for layer in layers for group in fsdp_groups(layer)):
        check_ranks(
            group.mesh_info.mesh.mesh.flatten().tolist(),
            process_group,
            "an FSDP model sharded over",
            "Give the mesh's data-parallel group to the balancer: "
            "`Runtime(process_group=mesh['dp'].get_group())`, for a mesh with that name.",
        )


def is_fsdp(module: nn.Module) -> bool:
    """Return whether FSDP, of either kind, shards ``module`` or a part of it."""
    kinds = tuple(filter(None, map(_loaded, ("FSDPModule", _FSDP1))))
    return any(isinstance(part, kinds) for part in module.modules())


def refuse_other_kinds(module: nn.Module) -> None:
    """Raise for FSDP1, whose steps cannot be distinguished, and tensor parallelism without FSDP2.

    Raises:
        ValueError: the message names the remedy.
    """
    kind = _loaded(_FSDP1)
    if kind is not None and any(isinstance(part, kind) for part in module.modules()):
        raise invalid(
            "Balancer.prepare(model)",
            "be plain, in DDP or sharded by FSDP2",
            f"{type(module).__name__} with FSDP1's `FullyShardedDataParallel`",
            _OTHER_KIND,
        )
    if not fsdp_layers(module) and any(hasattr(p, "device_mesh") for p in module.parameters()):
        raise invalid(
            "Balancer.prepare(model)",
            "average its gradients over the balanced ranks",
            f"{type(module).__name__} with parameters on a device mesh, and not by FSDP2",
            "Call `fully_shard(model, mesh=mesh['dp'])` over the mesh's data-parallel dimension.",
        )


class Shards:
    """A model's FSDP2 layers, led through steps in which ranks differ in their forwards.

    Args:
        layers: as ``fsdp_layers`` returns them.
    """

    def __init__(self, layers: list[Any]) -> None:
        self._layers = layers
        self._kept: list[tuple[Any, Any]] = []  # what to put back, while parameters are kept whole
        self._is_ahead = False
        self._gives_up = False  # after the forward under way
        self._is_open = False  # the newest backward reduced nothing
        self._is_synced = True  # the next one reduces

    @property
    def has_own_collectives(self) -> bool:
        """Whether a script gave a layer other collectives than torch's."""
        return any(map(has_own_collectives, self._layers))

    def give_up(self) -> None:
        """Have layers keep parameters whole no longer than the script said, from now on.

        What a step that was left has accumulated is no part of the next one.
        """
        self.reshard()
        if self._is_open:
            for layer in self._layers:
                forget_gradients(layer)
        for group, info in self._kept:
            group.post_forward_mesh_info, group.reshard_after_backward = info, True
        self._kept = []

    def gather(self, *, ahead: bool = False) -> None:
        """Make all parameters whole until the last backward, and wait for it. Collective.

        Ahead of a step's first forward it may be called as well: then that one gathers nothing.

        All are asked for at once, and the wait queues up behind them on the device's stream. What
        is whole is given up first: an optimizer may have stepped meanwhile, which it does on the
        shards.
        """
        was_ahead, self._is_ahead = self._is_ahead, ahead
        if was_ahead:
            return
        if not self._kept:
            self._kept = after_forward(self._layers)
            for layer in self._layers:
                layer.set_reshard_after_forward(False, recurse=False)
            self._synchronise(on=self._is_synced)  # its first backward may be to reduce nothing
        self.reshard()
        self._is_ahead = ahead
        handles = [layer.unshard(async_op=True) for layer in self._layers]
        for handle in handles:
            handle.wait()

    def enter(self, module: nn.Module, inputs: Any, keywords: Any) -> None:
        """Note that a forward begins: without gradients it leaves no parameter whole.

        Those that are whole already are kept: it comes among the micro-batches of a step.
        """
        self._is_open &= not torch.is_grad_enabled()
        self._gives_up = (
            bool(self._kept)
            and not torch.is_grad_enabled()
            and not any(is_whole(layer) for layer in self._layers)
        )

    def leave(self, module: nn.Module, inputs: Any, keywords: Any, output: Any) -> Any:
        """Note that the forward is over: one without gradients leaves no parameter whole."""
        if self._gives_up:
            self.reshard()
        return output

    def reshard(self) -> None:
        """Give up whole parameters, as after a loop that was left in the middle of a step."""
        self._is_ahead = False
        if self._kept:
            for layer in self._layers:
                layer.reshard()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Reduce nothing in the backwards inside, and give up no parameter that is kept."""
        self._synchronise(on=False)
        try:
            yield
        finally:
            self._synchronise(on=True)
            self._is_open = True

    def _synchronise(self, *, on: bool) -> None:
        self._is_synced = on
        for layer in self._layers:
            layer.set_requires_gradient_sync(on, recurse=False)
            if self._kept:
                layer.set_reshard_after_backward(on, recurse=False)


def _loaded(name: str) -> Any:
    """Return a class of FSDP's if it has been imported: else no model can be of it."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), name, None)
