"""What Accelerate can be set up for that is not balanced, refused before training starts."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ..exceptions import invalid


def check_accelerator(accelerator: Any) -> None:
    """Raise unless the accelerator runs one process, or several with DDP.

    Raises:
        ValueError: another kind of distributed training, or more than the data parallel dimension.
    """
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise invalid(
            "Accelerator(...)",
            "train with DDP, or in one process",
            kind,
            "Choose no FSDP, DeepSpeed or Megatron plugin; with FSDP2, use `evenstep.torch`.",
        )
    if dist.is_initialized() and dist.get_world_size() != accelerator.num_processes:
        # Where processes are started on a machine without accelerators, Accelerate may join them
        # and count one all the same: each would then train by itself.
        raise invalid(
            "Accelerator(...)",
            f"count the {dist.get_world_size()} processes that were started",
            f"{accelerator.num_processes}",
            "On CPUs set `Accelerator(cpu=True)`, in Trainer `TrainingArguments(use_cpu=True)`.",
        )
    plan = getattr(accelerator, "parallelism_config", None)
    sizes = {name: getattr(plan, f"{name}_size", 1) for name in ("tp", "cp", "sp")}
    if wrong := [name for name, size in sizes.items() if (size or 1) > 1]:
        raise invalid(
            "Accelerator(parallelism_config=...)",
            "have the data parallel dimension alone",
            ", ".join(f"{name}_size={sizes[name]}" for name in wrong),
            "Balance a job without it, or use `evenstep.torch` with the data parallel group.",
        )


def check_model(model: Any) -> None:
    """Raise if the model was compiled around DDP, where its hooks would be compiled too.

    Raises:
        ValueError: it was.
    """
    inner = getattr(model, "_orig_mod", None)
    if inner is not None and hasattr(inner, "module"):
        raise invalid(
            "Accelerator(dynamo_backend=...)",
            "be left out: it compiles the model around DDP",
            type(model).__name__,
            "Compile inside it: `accelerator.prepare(torch.compile(model), ...)`.",
        )
