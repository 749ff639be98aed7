"""The weight of a forward in the loss of the whole step, where `Trainer` gives it none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..torch._data._step import Step
from ._normalised import Divisor, count
from ._portions import Forward


def weight_of(forward: Forward, divisor: Divisor, total: Any) -> Any:
    """Return what a forward's loss, divided by its own, is multiplied by for its share of a step.

    Args:
        forward: of this rank.
        divisor: what the loss divides by itself.
        total: of that over the step and all ranks, by the number of ranks: DDP divides by it.
    """
    own = count(forward.batch, forward.num_samples, divisor) if forward.num_samples else 0
    return own / total if own else 0


def total_of(trainer: Any, step: Step, divisor: Divisor) -> Any:
    """Return what losses of a step divide by, over all ranks, by their number. Collective.

    Args:
        trainer: that trains.
        step: whose micro-batches this rank is about to train on.
        divisor: which of their counts.
    """
    if divisor == "samples":
        return step.global_num_samples / trainer.accelerator.num_processes
    parts = [part for part in step.micro_batches if part.num_samples]
    own = sum(count(part.batch, part.num_samples, divisor) or 0 for part in parts)
    device = trainer.args.device
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return trainer.accelerator.reduce(torch.tensor(own, device=device, dtype=dtype), "mean")


@contextmanager
def weighted(trainer: Any, weight: Any) -> Iterator[None]:
    """Have the loss of a forward in the block multiplied, whatever computes it.

    On the object alone: a class below may compute a loss of its own.
    """
    before = vars(trainer).get("compute_loss")
    compute = trainer.compute_loss

    def compute_loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = compute(*args, **kwargs)
        return loss * torch.as_tensor(weight, dtype=loss.dtype, device=loss.device)

    trainer.compute_loss = compute_loss
    try:
        yield
    finally:
        if before is None:
            del trainer.compute_loss
        else:
            trainer.compute_loss = before
