"""DeepSpeed: its engine averages gradients itself, in whatever stage of ZeRO, and is not wrapped.

Wrong, and refused, where ranks other than the balanced ones are averaged over, and in a pipeline,
whose engine takes batches by itself.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

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
    theirs = torch.distributed.get_process_group_ranks(engine.data_parallel_group)
    ours = torch.distributed.get_process_group_ranks(process_group or torch.distributed.group.WORLD)
    if sorted(theirs) != sorted(ours):
        raise invalid(
            "Balancer.prepare(model)",
            f"average gradients over the balancer's ranks, {ours}",
            f"an engine that averages over {theirs}",
            "Give its group to the balancer: `Runtime(process_group=engine.data_parallel_group)`.",
        )


def refuse_micro_batches() -> None:
    """Raise for a loop over micro-batches, in which ranks would differ in their collectives."""
    raise invalid(
        "A DeepSpeed engine",
        "be trained in a loop over whole batches, since every backward reduces",
        "`loader.steps()`",
        "Use `for batch in loader`; the engine accumulates by `gradient_accumulation_steps`.",
    )
