"""What a ``Trainer`` can be set up for that is not balanced, refused before training starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ..exceptions import invalid
from ..torch._model._fsdp import fsdp_layers
from ._library import takes_loader

_TUNERS = {"BatchSizeFinder", "LearningRateFinder"}


def check_options(options: Mapping[str, Any]) -> None:
    """Raise for settings of a balancer that Lightning decides.

    Raises:
        ValueError: there are some; the message says where they belong.
    """
    if getattr(options.get("runtime"), "process_group", None) is not None:
        rule, remedy = "leave out `Runtime(process_group=...)`", "Lightning trains on all ranks."
        raise invalid("BalanceCallback(runtime=...)", rule, "one", remedy)
    if options.get("network") is not None:
        rule = "be left out, as Lightning reduces the gradients"
        raise invalid(
            "BalanceCallback(network=...)",
            rule,
            options["network"],
            "Use `evenstep.torch` in a loop of your own.",
        )


def check_trainer(trainer: Any, module: Any) -> None:
    """Raise if the trainer is set up for what is not balanced.

    Raises:
        ValueError: it is; the message says what to do.
    """
    if not module.automatic_optimization:
        # The backward happens inside of the forward that is weighted, before its output is there.
        raise invalid(
            "LightningModule.automatic_optimization",
            "be True, so that the loss is weighted before its backward",
            False,
            "Return one loss from `training_step`, or use Fabric and `evenstep.torch`.",
        )
    if takes_loader(module.training_step):
        # The batch is taken inside of the forward: what is known then is the batch before.
        raise invalid(
            "LightningModule.training_step(dataloader_iter)",
            "take a batch, so that its size is known before the forward",
            "the loader's iterator",
            "Write `training_step(self, batch, batch_idx)`.",
        )
    if trainer.reload_dataloaders_every_n_epochs:
        raise invalid(
            "Trainer(reload_dataloaders_every_n_epochs=...)",
            "be 0, as all loaders are prepared before the first step",
            trainer.reload_dataloaders_every_n_epochs,
            "Have the data set or the sampler change with `set_epoch`.",
        )
    kinds = {kind.__name__ for callback in trainer.callbacks for kind in type(callback).__mro__}
    if tuners := sorted(kinds & _TUNERS):
        raise invalid(
            "Trainer(callbacks=...)",
            "have no tuner beside `BalanceCallback`, which counts the steps of one training",
            tuners[0],
            "Tune with a `Trainer` of its own, without `BalanceCallback`, before this one.",
        )


def averaged_model(strategy: Any) -> Any:
    """Return what averages gradients over the ranks: Lightning's DDP, or what FSDP2 shards.

    Raises:
        ValueError: nothing does, or not all of them.
    """
    module = strategy.model
    if isinstance(module, DistributedDataParallel):
        return module
    layers = fsdp_layers(module)
    if not layers:
        raise invalid(
            "Trainer(strategy=...)",
            "train with DDP or FSDP2",
            type(strategy).__name__,
            'Use `Trainer(strategy="ddp")`, or `ModelParallelStrategy()` and `fully_shard` in '
            "`configure_model`.",
        )
    sharded = set(layers[0].parameters())
    if layers[0] is module or any(p.requires_grad for p in set(module.parameters()) - sharded):
        raise invalid(
            "LightningModule.configure_model()",
            "shard one model of the module's, with all that is trained",
            "the module itself" if layers[0] is module else "a part of what is trained",
            "Write `fully_shard(self.model, mesh=self.device_mesh['data_parallel'])` after its "
            "layers.",
        )
    return layers[0]
