"""What Accelerate can be set up for that is not balanced, refused before training starts."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ..exceptions import invalid
from ..torch._data.compare._stated import first_indices

_GROUPS = (
    "Train without `BalancedMixin`: where a rank generates its own samples, as in TRL's "
    "`GRPOTrainer`, groups of them belong to one rank and one step."
)


def check_accelerator(accelerator: Any) -> None:
    """Raise unless the accelerator runs one process, or several with DDP or FSDP2.

    Raises:
        ValueError: another kind of distributed training, or more than the data parallel dimension.
    """
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    is_fsdp2 = kind == "FSDP" and getattr(accelerator, "is_fsdp2", False)
    if kind != "NO" and not kind.startswith("MULTI_") and not is_fsdp2:
        raise invalid(
            "Accelerator(...)",
            "train with DDP or FSDP2, or in one process",
            kind,
            "Choose no DeepSpeed or Megatron plugin, and FSDP with `fsdp_version=2`.",
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


def check_batches(trainer: Any, sampler: Any) -> None:
    """Raise for a trainer whose batches are no samples that can be shared out one by one.

    Args:
        trainer: a `Trainer`.
        sampler: of its training data.

    Raises:
        ValueError: it makes samples of its batches, or repeats each in a row.
    """
    kind = next(kind for kind in type(trainer).__mro__ if "_prepare_inputs" in vars(kind))
    name = type(trainer).__name__
    if kind.__module__.partition(".")[0] != "transformers":
        raise invalid(
            f"{name}._prepare_inputs(...)",
            "be left to Trainer: forwards are parts of a step, of other sizes on every rank, and "
            "as many as each rank can make",
            f"that of {kind.__name__}",
            f"Move what changes a batch into the data collator, or into `compute_loss`. {_GROUPS}",
        )
    indices = first_indices(sampler)
    around = zip([None, *indices], indices, indices[1:], strict=False)  # the last may be cut off
    has_lone = any(before != here != after for before, here, after in around)
    if len(set(indices)) > 1 and not has_lone:
        raise invalid(
            f"{name}(train_dataset=...)",
            "yield each sample once in a row, since samples are shared out one by one",
            f"a {type(sampler).__name__} that repeats each: {indices[:4]}, ...",
            _GROUPS,
        )
