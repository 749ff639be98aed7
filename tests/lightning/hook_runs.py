"""Fits of a module that logs in the hooks of a batch."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.nn import functional

from evenstep.lightning import BalanceCallback

from .fit_runs import BALANCED, Case, Scores, loaders, trainer_of


class Hooked(Scores):
    """Logs in hooks around a step, before it and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.told = {name: [] for name in ("start", "after", "end", "val_end")}

    def tell(self, hook: str, name: str, value: torch.Tensor) -> None:
        self.log(name, value, on_step=True, on_epoch=False, sync_dist=True)
        self.told[name].append(self.trainer._results[f"{hook}.{name}"].value)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.loss = functional.cross_entropy(self.net(batch[0]), batch[1])
        return self.loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.tell("on_train_batch_start", "start", batch[0].mean())

    def on_after_backward(self) -> None:
        self.tell("on_after_backward", "after", self.loss.detach())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.tell("on_train_batch_end", "end", outputs["loss"])

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.tell("on_validation_batch_end", "val_end", outputs)

    def on_validation_end(self) -> None:
        pass

    def on_train_epoch_end(self) -> None:
        pass


def hooked(rank: int, world_size: int) -> dict[str, list[float]]:
    """Return what was logged in the hooks of each batch."""
    module = Hooked()
    callbacks = [BalanceCallback(**BALANCED)] if world_size > 1 else []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer_of(world_size, callbacks).fit(module, *loaders(Case(), world_size))
    return {name: [float(value) for value in values] for name, values in module.told.items()}
