"""Whether a loss divides by `num_items_in_batch`, as Trainer takes for granted."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..exceptions import invalid

_REMEDY = (
    "Set `model.accepts_loss_kwargs = False` before the trainer is made: then the loss counts as a "
    "mean over samples, or over the `unit` in `balancing`."
)


def check_normalised(trainer: Any, batch: Any, num_items: Any) -> None:
    """Raise if the loss of ``batch`` does not change with the number that it is to be divided by.

    Two forwards without gradient, in evaluation mode, on the model beneath DDP. Some models accept
    loss keywords and leave them unread, as for regression: theirs is a mean over the rank's own
    samples, and plain training is then off as soon as ranks hold unlike numbers of targets.

    Args:
        trainer: that trains.
        batch: of one forward; its device does not matter.
        num_items: targets of the step over all ranks; None where Trainer could not count them.

    Raises:
        ValueError: it does not, or there is no number.
    """
    where = f"{type(trainer).__name__}(model=...)"
    if num_items is None:
        raise invalid(
            where,
            "be trained on batches whose targets Trainer can count, under `labels`",
            f"a batch with {sorted(map(str, batch))}",
            _REMEDY,
        )
    once, twice = (_loss(trainer, batch, factor * num_items) for factor in (1, 2))
    if once and math.isfinite(once) and math.isclose(once, twice, rel_tol=1e-4):
        raise invalid(
            where,
            "have a loss that is divided by `num_items_in_batch`, which is given to it",
            f"a loss of {once:.6g}, and {twice:.6g} for twice as many items",
            _REMEDY,
        )


def _loss(trainer: Any, batch: Any, num_items: Any) -> float:
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    trains = model.training
    model.eval()
    try:
        with torch.no_grad(), trainer.compute_loss_context_manager():
            inputs = trainer._prepare_inputs(dict(batch))
            return float(trainer.compute_loss(model, inputs, num_items_in_batch=num_items))
    finally:
        model.train(trains)
