"""Weights of forwards that nothing can make right: the backward raises, and names the remedy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn


def rows_of_several(sizes: Sequence[int]) -> Callable[[], NoReturn]:
    """Return the weight of a forward that has rows of several batches, of these sizes."""
    size = sizes[-1] if sizes else 0

    def unknown() -> NoReturn:
        raise RuntimeError(
            f"A forward has rows of several batches, or rows beside those of a batch of {size} "
            f"samples: no single weight is right for them. Give each batch its own forward. If all "
            f"rows belong to one batch, or its own loss alone is weighted, under "
            f"`prepare(..., weighting='loss')`, name it around the forward: "
            f"`with balancer.step(batch): ...`."
        )

    return unknown


def not_told(sizes: Sequence[int]) -> Callable[[], NoReturn]:
    """Return the weight of a forward that may belong to any of several batches, of these sizes."""

    def unknown() -> NoReturn:
        raise RuntimeError(
            f"No rank can tell which batch this backward belongs to: batches of {list(sizes)} "
            f"samples are in use, and neither the tensors nor the sizes of its inputs match one of "
            f"them. Name the batch around the forward: `with balancer.step(batch): loss = ...`, "
            f"with `batch` as the loader handed it out."
        )

    return unknown


def not_averaged() -> NoReturn:
    """Raise for the weight of a micro-batch whose gradient DDP would average before the last."""
    raise RuntimeError(
        "A forward of this model in the last micro-batch of a step had no backward. DDP waits for "
        "one, and would average the gradient of this micro-batch, on this rank alone. Run "
        "forwards whose gradient is not used without gradients: "
        "`with torch.no_grad(): fake = generator(noise)`."
    )
