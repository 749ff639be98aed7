"""What a ``Trainer`` can be set up for that is not balanced, refused before training starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ..exceptions import invalid
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


def check_ddp(model: Any, strategy: Any) -> None:
    """Raise unless several processes train the model in a DDP.

    Raises:
        ValueError: they do not.
    """
    if not isinstance(model, DistributedDataParallel):
        raise invalid(
            "Trainer(strategy=...)",
            "train with DDP",
            type(strategy).__name__,
            'Use `Trainer(strategy="ddp")`; with FSDP2, `evenstep.torch` in a loop of your own.',
        )
