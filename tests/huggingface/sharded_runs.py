"""`Trainer` and Accelerate on models that Accelerate shards, by FSDP2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import accelerate_runs, trainer_runs
from .small import offline

TRAINED = ("targets masked, tokens counted", "accumulation, tokens counted")
TRAINED_STOCK = ("classifier", "causal, rows gathered")
LOOPS = ("plain", "accumulation, the last one short")


def shard(layer: str) -> None:
    """Have accelerators of this process shard models by FSDP2, each layer of a class by itself.

    On CPUs they leave their plugin aside without a word, and wrap models into DDP.
    """
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[layer],
        state_dict_type="FULL_STATE_DICT",
    )
    made = Accelerator.__init__

    def make(accelerator: Any, *args: Any, **kwargs: Any) -> None:
        made(accelerator, *args, **kwargs)
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin

    Accelerator.__init__ = make


def trained(rank: int, folder: str, layer: str, names: Sequence[str], stock: bool) -> Any:
    """Return the cases of `Trainer` whose models have layers of this class."""
    offline(folder)
    shard(layer)
    run = trainer_runs.stock_on_the_cluster if stock else trainer_runs.on_the_cluster
    return run(rank, folder, names)


def looped(rank: int, folder: str) -> Any:
    """Return the loops of Accelerate."""
    offline(folder)
    shard("Embedding")
    return accelerate_runs.on_the_cluster(rank, folder, LOOPS)
