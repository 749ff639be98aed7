"""Cut a collated batch by its samples: what a forward that did not fit is made smaller by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...exceptions import invalid
from .._containers import rebuild


def split_rows(batch: Any, num_samples: int, sizes: Sequence[int]) -> list[Any]:
    """Return ``batch`` in parts of ``sizes`` samples, one after the other.

    Right for what collates samples along the first dimension: tensors, and lists of one entry per
    sample, in dicts, lists, tuples, named tuples and dataclasses. What has no entry per sample
    is passed to every part. Tensors are views: nothing is copied.

    Args:
        batch: a collated batch.
        num_samples: how many samples it holds.
        sizes: of the parts, positive, adding up to ``num_samples``.

    Raises:
        ValueError: nothing in the batch has one entry per sample.
    """
    parts, first = [], 0
    for size in sizes:
        parts.append(_selected(batch, num_samples, slice(first, first + size)))
        first += size
    return parts


def repeat_rows(batch: Any, num_samples: int, wanted: int) -> Any:
    """Return a batch of ``wanted`` samples: those of ``batch``, over and over.

    Raises:
        ValueError: nothing in the batch has one entry per sample.
    """
    return _selected(batch, num_samples, [row % num_samples for row in range(wanted)])


def _selected(batch: Any, num_samples: int, rows: slice | list[int]) -> Any:
    found = False

    def visit(item: Any) -> Any:
        nonlocal found
        if _is_per_sample(item, num_samples):
            found = True
            return _take(item, rows)
        return rebuild(item, visit)

    selected = visit(batch)
    if not found:
        raise invalid(
            "Step.backward(...)",
            f"get batches that can be cut: tensors or lists with one entry for each of the "
            f"{num_samples} samples",
            f"a {type(batch).__name__} without any",
            "Have `collate_fn` lay samples along the first dimension, or set `Bounds(max=...)`.",
        )
    return selected


def _is_per_sample(item: Any, num_samples: int) -> bool:
    """Tell whether ``item`` has one entry per sample.

    A list or tuple as long as the batch may hold fields instead, in a batch of as many samples as
    fields: if all of its entries are as long themselves, it is taken for that.
    """
    if isinstance(item, torch.Tensor):
        return item.dim() > 0 and len(item) == num_samples
    if not isinstance(item, (list, tuple)) or hasattr(item, "_fields") or len(item) != num_samples:
        return False
    return not all(_is_per_sample(entry, num_samples) for entry in item)


def _take(item: Any, rows: slice | list[int]) -> Any:
    if isinstance(item, torch.Tensor) or isinstance(rows, slice):
        return item[rows]
    return type(item)([item[row] for row in rows])
