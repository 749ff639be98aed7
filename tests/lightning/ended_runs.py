"""Fits of Lightning's Trainer that end with an error, on a cluster."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from evenstep.lightning import BalanceCallback

from .fit_runs import BALANCED, Case, Scores, loaders, samples, trainer_of


class Gathers(Scores):
    """Gathers what has as many rows as a batch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        scores = self.net(x)
        self.all_gather(scores.detach())
        return functional.cross_entropy(scores, y)


class Unwrapped(DDPStrategy):
    """A strategy that trains the model in no DDP."""

    def _setup_model(self, model: nn.Module) -> Any:
        return model

    def _register_ddp_hooks(self) -> None:
        pass


MISTAKES = {
    "rows gathered": (Gathers, {}, "log with `sync_dist=True`"),
    "several loaders": (Scores, {"several": True}, "Join the data sets"),
    "too few held out": (Scores, {"held_out": 1}, "Evaluate more samples"),
    "no DDP": (Scores, {"strategy": Unwrapped()}, 'Use `Trainer(strategy="ddp")`'),
}


def mistakes(rank: int) -> dict[str, str]:
    """Return the error's text of every mistake, one fit after the other."""
    texts = {}
    for name, (kind, options, _) in MISTAKES.items():
        train, held_out = loaders(Case(), 2)
        given = dict(options)
        several = given.pop("several", False)
        if (count := given.pop("held_out", None)) is not None:
            held_out = DataLoader(samples(count, 2))
        trainer = trainer_of(2, [BalanceCallback(**BALANCED)], **given)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trainer.fit(kind(), {"a": train, "b": train} if several else train, held_out)
        except ValueError as error:
            texts[name] = str(error)
    return texts


class Dying(Scores):
    """Ends one process without a word."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1 and batch_idx == 2:
            os._exit(1)
        return super().training_step(batch, batch_idx)


def losing(rank: int) -> str:
    """Return the error that a rank ends with once another one is gone."""
    trainer = trainer_of(2, [BalanceCallback(**BALANCED)])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(Dying(), *loaders(Case(), 2))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"
