"""Find by trial how many samples one forward of a rank can hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._data._protocols import MicroBatch
from .._model._prepared import PreparedModels
from ._kept import kept
from ._layout import Layout
from ._oom import attempt, free_memory

Closure = Callable[[Any], torch.Tensor]
"""The user's forward: from a micro-batch to its loss."""

_MARGIN = 0.9  # of what was found: fragmentation, longer sequences, an evaluation in between


def probe(
    part: MicroBatch,
    closure: Closure,
    through: Callable[[torch.Tensor], Any],
    *,
    most: int,
    smallest: int,
    layout: Layout,
    models: PreparedModels,
) -> int | None:
    """Return the most samples that one forward should get, or None if ``most`` of them fit.

    Runs forward and backward at doubling sizes, made by repeating the samples at hand, until one
    does not fit; then halves the interval to within a tenth. A tenth is left free. Gradients are
    thrown away; buffers (running statistics) and the random state are put back. Other ranks are
    not needed for any of it: nothing is synchronised.

    Right where memory grows with the number of samples, whatever is in them. Wrong where it
    depends on their lengths: probe on the longest, or set `Bounds(max=...)`. Optimizer state that
    is made in the first step comes on top: what then runs out is cut by ``Retries``.

    Args:
        part: a micro-batch of real samples.
        closure: from a batch to its loss.
        through: runs the backward of a loss.
        most: largest size worth knowing, at least 1.
        smallest: samples that one forward needs at least.
        layout: tells what of a batch has one entry per sample.
        models: whose gradients and buffers are put back, and whose backwards do not synchronise.

    Raises:
        RuntimeError: not even ``smallest`` samples fit.
    """
    held = max(part.num_samples, 1)

    def fits(size: int) -> bool:
        def forward_and_backward() -> None:
            with models.no_sync():
                through(closure(layout.repeat(part.batch, held, size)))

        failed = attempt(forward_and_backward)
        if failed is not None:
            models.forget_forward()
        free_memory()
        return failed is None

    with kept(models.modules()):
        good = _largest(fits, start=max(min(held, most), smallest), most=most)
    if good == most:
        return None
    if good < smallest:
        raise RuntimeError(
            f"Not even {smallest} samples fit into this worker's memory. Use a smaller model, "
            f"activation checkpointing, or leave this worker out."
        )
    return max(int(_MARGIN * good), smallest)


def _largest(fits: Callable[[int], bool], *, start: int, most: int) -> int:
    """Return a size that fits and is within a tenth of the largest; 0 if none does."""
    good, bad, size = 0, None, start
    while bad is None and good < most:
        if fits(size):
            good, size = size, min(2 * size, most)
        else:
            bad = size
    while bad is not None and bad - good > max(1, good // 10):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good
