"""Lengths of samples that are known only when they are fetched or collated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, final

from torch.utils.data import DataLoader

from ...._planner import batch_lengths
from ...._types import IntArray
from .._protocols import MicroBatch
from ._torch_loader import with_parts


class MeasuredBatch(NamedTuple):
    """A batch, and the length of each of its samples: a tuple, of which torch pins the parts."""

    batch: Any
    lengths: IntArray


def measuring(loader: DataLoader[Any], of: Any) -> DataLoader[Any]:
    """Return a loader whose batches are ``MeasuredBatch``.

    It collates in the training process, where samples and batch come together.

    Args:
        loader: the user's own.
        of: as in ``Cost(from_batch=...)``.
    """
    return with_parts(loader, collate_fn=_Measuring(loader.collate_fn, of))


def unpacked(parts: Sequence[MicroBatch]) -> tuple[list[MicroBatch], list[IntArray]]:
    """Return a step's micro-batches as the user's ``collate_fn`` made them, and their lengths."""
    plain = [replace(part, batch=part.batch.batch) for part in parts]
    return plain, [part.batch.lengths for part in parts]


@final
class _Measuring:
    """A ``collate_fn`` that tells lengths."""

    def __init__(self, collate: Callable[[Any], Any], of: Any) -> None:
        self._collate = collate
        self._of = of

    def __call__(self, samples: list[Any]) -> MeasuredBatch:
        return MeasuredBatch(*batch_lengths(self._of, samples, self._collate))
