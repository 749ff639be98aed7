"""A loss in which ranks wait for each other, as where it gathers metrics: as many forwards on all.

`Trainer` calls it once for each forward, and ranks have unlike numbers of forwards. One that makes
a call more than the others waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any, final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .._private_torch import CollectiveCount, meet
from ._state_before import StateBefore


@final
class LossCalls:
    """The loss of a batch, without gradients, on the model beneath DDP.

    Args:
        trainer: computes it.

    Attributes:
        num_calls: so far.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.num_calls = 0

    def __call__(self, batch: Any, num_items: Any) -> float:
        """Return the loss, with the same random numbers in every call; nothing counts it."""
        self.num_calls += 1
        before = StateBefore(self._trainer)
        try:
            return float(without_gradient(self._trainer, batch, num_items))
        finally:
            before.restore()


def without_gradient(trainer: Any, batch: Any, num_items: Any) -> Any:
    """Return the loss of a batch on the model beneath DDP, and leave random states as they are.

    To the trainer it is a forward in training, whatever came before it, such as an evaluation.
    """
    model, device = trainer.accelerator.unwrap_model(trainer.model_wrapped), trainer.args.device
    with (
        _as_in_training(model, trainer.model, trainer.model_wrapped),
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        torch.no_grad(),
        trainer.compute_loss_context_manager(),
    ):
        torch.manual_seed(0)  # what is drawn in evaluation mode too is drawn alike
        inputs = trainer._prepare_inputs(copy(batch))
        return trainer.compute_loss(model, inputs, num_items_in_batch=num_items)


@contextmanager
def _as_in_training(*models: nn.Module) -> Iterator[None]:
    """Have models say that they train, while their layers neither drop out nor take statistics."""
    modes = {module: module.training for model in models for module in model.modules()}
    try:
        for model in models:
            model.eval()
        for model in models:
            model.training = True
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def meets(trainer: Any, batch: Any, num_items: Any) -> bool:
    """Tell whether ranks meet where the loss is computed. Collective: every rank computes one."""
    if trainer.accelerator.num_processes == 1:
        return False
    count = CollectiveCount()
    before = count()
    LossCalls(trainer)(batch, num_items)
    return count() != before


def num_missing(trainer: Any, num_forwards: int) -> int:
    """Return how many forwards this rank has less than the one with the most. Collective."""
    mine = torch.tensor([num_forwards], device=trainer.args.device)
    counts: list[int] = trainer.accelerator.gather(mine).tolist()
    return max(counts) - num_forwards


def meet_before_forwards(trainer: Any) -> None:
    """Have ranks meet now in what DDP does at the begin of a forward. Collective.

    Ranks differ in which of a step's portions their first forward is. Between portions `Trainer`
    may gather the number of tokens, and callbacks what they like.
    """
    if isinstance(trainer.model_wrapped, DistributedDataParallel):
        meet(trainer.model_wrapped)
