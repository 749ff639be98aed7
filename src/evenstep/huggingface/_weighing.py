"""The weight of a forward in the loss of the whole step, where `Trainer` gives it none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..exceptions import invalid
from ..torch._data._step import Step
from ._normalised import Divisor, count


def weights_of(trainer: Any, step: Step, divisor: Divisor) -> list[Any]:
    """Return what the loss of each of this rank's forwards, divided by its own, is multiplied by.

    That is its share of what the step has over all ranks, times their number: DDP divides by it.
    A forward with nothing in it weighs the number 0, as its mean is no number. Collective.
    """
    parts, accelerator = step.micro_batches, trainer.accelerator
    own = [
        (count(part.batch, part.num_samples, divisor) or 0) if part.num_samples else 0
        for part in parts
    ]
    total: Any = step.global_num_samples / accelerator.num_processes
    if divisor != "samples":
        device = trainer.args.device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        total = accelerator.reduce(torch.tensor(sum(own), device=device, dtype=dtype), "mean")
    return [each / total if each else 0 for each in own]


@contextmanager
def weighted(trainer: Any, weight: Any) -> Iterator[None]:
    """Have the loss of a forward in the block multiplied, whatever computes it.

    On the object alone: a class below may compute a loss of its own.

    Args:
        trainer: computes it.
        weight: None leaves the loss as it is.

    Raises:
        ValueError: it was not computed by ``compute_loss``, of which alone the weight is known.
    """
    before = vars(trainer).get("compute_loss")
    compute = trainer.compute_loss
    is_computed = False

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_computed
        is_computed = True
        found = compute(*args, **kwargs)
        if weight is None:
            return found
        loss, *more = found if isinstance(found, tuple) else (found,)
        loss = loss * torch.as_tensor(weight, dtype=loss.dtype, device=loss.device)
        return (loss, *more) if more else loss

    trainer.compute_loss = compute_loss
    try:
        yield
    finally:
        if before is None:
            del trainer.compute_loss
        else:
            trainer.compute_loss = before
    if not is_computed:
        raise invalid(
            f"{type(trainer).__name__}.training_step(...)",
            "get its loss from `self.compute_loss`, where it is weighted",
            "one that has another",
            "Move what computes the loss into `compute_loss`.",
        )
