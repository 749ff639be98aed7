"""The weight of a forward in the loss of the whole step, where `Trainer` gives it none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ._normalised import Divisor, count_targets
from ._portions import Forward


def weight_of(
    trainer: Any, forward: Forward, divisor: Divisor, *, num_samples: int, num_items: Any
) -> Any:
    """Return what the loss of a forward is multiplied by: its share of the step, times the ranks.

    DDP divides by the ranks again. A forward without targets has weight 0.

    Args:
        trainer: that trains.
        forward: of this rank.
        divisor: what the loss divides by itself.
        num_samples: of the step over all ranks.
        num_items: targets of the step over all ranks, where the divisor is ``"targets"``.
    """
    num_ranks = trainer.accelerator.num_processes
    if divisor == "items":  # divided by those of all ranks, and multiplied by the ranks
        return 1
    if divisor == "samples" or not forward.num_samples:
        return forward.num_samples * num_ranks / num_samples
    count = count_targets(trainer, forward.batch) or 0
    return num_ranks * count / num_items if count else 0


@contextmanager
def weighted(trainer: Any, weight: Any) -> Iterator[None]:
    """Have the loss of a forward in the block multiplied, whoever computes it.

    On the object alone: a class below may compute a loss of its own.
    """
    before = vars(trainer).get("compute_loss")
    compute = trainer.compute_loss

    def compute_loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = compute(*args, **kwargs) * weight
        return loss

    trainer.compute_loss = compute_loss
    try:
        yield
    finally:
        if before is None:
            del trainer.compute_loss
        else:
            trainer.compute_loss = before
