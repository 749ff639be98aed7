"""Lengths of samples that are known only when they are fetched or collated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch.utils.data import DataLoader

from ...._planner import batch_lengths
from ...._types import IntArray
from ...._warning import warn
from .._protocols import ANEW, MicroBatch
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
    return with_parts(loader, collate_fn=partial(_measured, of, loader.collate_fn))


def _measured(of: Any, collate: Callable[[Any], Any], samples: list[Any]) -> MeasuredBatch:
    return MeasuredBatch(*batch_lengths(of, samples, collate))


@final
class CapCheck:
    """Warns once of a forward over the cap, as of samples that are longer than ``prepare`` found.

    By tensors of the batch that had as many elements as the lengths say, in all forwards so far.

    Args:
        max_size: as in ``Cost``.
    """

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._exact: set[str] | None = None  # names of those tensors; None before the first forward

    def look(self, parts: Sequence[MicroBatch]) -> None:
        """Look at the forwards of a step."""
        for part in parts:
            if self._exact == set() or not part.num_samples:
                continue
            found = dict(_numbers_in(part.batch))
            for name in self._exact or ():
                if part.size <= self._max_size < found.get(name, 0):
                    self._exact = set()
                    self._warn(found[name])
                    return
            exact = {name for name, number in found.items() if number == part.size}
            self._exact = exact if self._exact is None else self._exact & exact

    def _warn(self, found: int) -> None:
        warn(
            f"A forward has a size of {found} where `Cost(max_size={self._max_size})` is the cap: "
            f"samples have become longer than `prepare` found them, which reads lengths once. "
            f"When they change: {ANEW}"
        )


def _numbers_in(batch: Any, name: str = "") -> Iterator[tuple[str, int]]:
    """Yield the number of elements of every tensor of a batch, by a name."""
    if isinstance(batch, torch.Tensor):
        yield name, batch.numel()
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _numbers_in(value, f"{name}.{key}")
    elif isinstance(batch, list | tuple):
        for place, value in enumerate(batch):
            yield from _numbers_in(value, f"{name}.{place}")
