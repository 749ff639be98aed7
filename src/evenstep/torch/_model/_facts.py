"""What a rank states about a model, to be compared with the other ranks' before it is wrapped."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from ..._exchange._world_check import qualified
from ..._private_torch import original_of
from ._compiled import ddp_of
from ._fsdp import fsdp_layers

Listing = dict[str, str]

_OF_DDP = ("find_unused_parameters", "static_graph", "broadcast_buffers")


def model_facts(module: nn.Module) -> dict[str, str]:
    """Return what decides on collectives and results, but for what ``model_listings`` has.

    Devices may differ, and whether it is compiled.
    """
    ddp = ddp_of(module)
    plain = original_of(module if ddp is None else ddp.module)
    kind = "DDP" if ddp is not None else "FSDP2" if fsdp_layers(module) else "plain"
    facts = {"The model's class": qualified(type(plain)), "The model's wrapper": kind}
    for name in _OF_DDP if ddp is not None else ():
        facts[f"`DistributedDataParallel({name}=...)`"] = repr(getattr(ddp, name, None))
    return facts


def model_listings(module: nn.Module) -> dict[str, Listing]:
    """Return each parameter, buffer and layer of torch's own in ``module``, by its name."""
    return {
        "parameter": _each(module.named_parameters(), _of_parameter),
        "buffer": _each(module.named_buffers(), _of_tensor),
        "layer": {
            _bare(name): f"{type(layer).__name__}({layer.extra_repr()})"
            for name, layer in module.named_modules()
            if type(layer).__module__.startswith("torch.nn.modules.")
        },
    }


def _each(
    tensors: Iterable[tuple[str, torch.Tensor]], text_of: Callable[[torch.Tensor], str]
) -> Listing:
    return {_bare(name): text_of(tensor) for name, tensor in tensors}


def _of_parameter(parameter: torch.Tensor) -> str:
    return _of_tensor(parameter) + ("" if parameter.requires_grad else ", frozen")


def _of_tensor(tensor: torch.Tensor) -> str:
    try:
        shape = tuple(tensor.shape)
    except RuntimeError:  # of a lazy module, before its first forward
        return "uninitialized"
    return f"{str(tensor.dtype).removeprefix('torch.')} {shape}"


def _bare(name: str) -> str:
    """Return a name without what DDP and ``torch.compile`` put before it."""
    return f"{name}.".replace("_orig_mod.", "").removeprefix("module.").removesuffix(".")
