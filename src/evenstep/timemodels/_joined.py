"""Workers of different kinds, each described by the model that suits it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from .._types import FloatArray, IntArray
from ..exceptions import invalid
from ._base import AbstractTimeModel


@final
@dataclass(frozen=True, slots=True, eq=False, init=False)
class JoinedTime(AbstractTimeModel):
    """Several time models side by side: GPUs by one, CPUs by another.

    Each worker takes what the part that holds it says. As right, and as exact, as its parts.

    Args:
        parts: time models, at least one.
        ranks: whose times they are, for each part the ranks of its workers in its own order. All
            together they are 0 to ``world_size - 1``, each once.

    Raises:
        ValueError: there are no parts, ``ranks`` has no entry for each of their workers, or names
            a rank twice or not at all.

    Usage:
        JoinedTime([PiecewiseTime(...), AffineTime(...)], [np.array([0, 1]), np.array([2])])
    """

    parts: tuple[AbstractTimeModel, ...]
    ranks: tuple[IntArray, ...]

    def __init__(self, parts: Sequence[AbstractTimeModel], ranks: Sequence[IntArray]) -> None:
        held = tuple(np.array(each) for each in ranks)
        _check(parts, held)
        held = tuple(each.astype(np.int64) for each in held)
        for array in held:
            array.flags.writeable = False
        object.__setattr__(self, "parts", tuple(parts))
        object.__setattr__(self, "ranks", held)

    @property
    def world_size(self) -> int:
        return sum(len(ranks) for ranks in self.ranks)

    def seconds(self, batch_size: IntArray) -> FloatArray:
        times = np.empty(self.world_size)
        for part, ranks in zip(self.parts, self.ranks, strict=True):
            times[ranks] = part.seconds(batch_size[ranks])
        return times

    def largest_batch(self, budget_s: float, most: IntArray) -> IntArray:
        batch = np.empty(self.world_size, np.int64)
        for part, ranks in zip(self.parts, self.ranks, strict=True):
            batch[ranks] = part.largest_batch(budget_s, most[ranks])
        return batch


def _check(parts: Sequence[AbstractTimeModel], ranks: tuple[IntArray, ...]) -> None:
    sizes = [part.world_size for part in parts]
    if not sizes:
        raise invalid("JoinedTime(parts=...)", "hold a time model", "none", "Give one or more.")
    name = "JoinedTime(ranks=...)"
    shapes = [each.shape for each in ranks]
    if shapes != [(size,) for size in sizes] or any(each.dtype.kind not in "iu" for each in ranks):
        rule = f"hold {sizes} integers, one for each worker of each part"
        raise invalid(name, rule, f"shapes {shapes}", "Name the rank of every worker.")
    together = np.concatenate(ranks)
    if not np.array_equal(np.sort(together), np.arange(len(together))):
        rule = f"name each rank from 0 to {len(together) - 1} once"
        raise invalid(name, rule, together.tolist(), "Number the workers as the cluster does.")
