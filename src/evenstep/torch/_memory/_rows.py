"""Cut a collated batch by its samples: what a forward that did not fit is made smaller by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._containers import rebuild
from ._layout import Layout


def split_rows(batch: Any, num_samples: int, sizes: Sequence[int], layout: Layout) -> list[Any]:
    """Return ``batch`` in parts of ``sizes`` samples, one after the other.

    Right for what collates samples along the first dimension: tensors, and lists of one entry per
    sample, in dicts, lists, tuples, named tuples and dataclasses. What has no entry per sample
    is passed to every part. Tensors are views: nothing is copied.

    Args:
        batch: a collated batch.
        num_samples: how many samples it holds.
        sizes: of the parts, positive, adding up to ``num_samples``.
        layout: tells what has one entry per sample.

    Raises:
        ValueError: nothing in the batch has one entry per sample, or that cannot be told.
    """
    parts, first = [], 0
    for size in sizes:
        parts.append(_selected(batch, num_samples, slice(first, first + size), layout))
        first += size
    return parts


def repeat_rows(batch: Any, num_samples: int, wanted: int, layout: Layout) -> Any:
    """Return a batch of ``wanted`` samples: those of ``batch``, over and over.

    Raises:
        ValueError: as for ``split_rows``.
    """
    return _selected(batch, num_samples, [row % num_samples for row in range(wanted)], layout)


def _selected(batch: Any, num_samples: int, rows: slice | list[int], layout: Layout) -> Any:
    chosen = {id(item) for item in layout.per_sample(batch, num_samples)}

    def visit(item: Any) -> Any:
        return _take(item, rows) if id(item) in chosen else rebuild(item, visit)

    return visit(batch)


def _take(item: Any, rows: slice | list[int]) -> Any:
    if isinstance(item, torch.Tensor) or isinstance(rows, slice):
        return item[rows]
    return type(item)([item[row] for row in rows])
