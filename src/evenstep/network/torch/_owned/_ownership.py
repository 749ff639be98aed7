"""Who owns which elements of which parameter, in whole numbers that are the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self, final

import torch

from ..._plans._split import Split, cut

UNIT = 64
"""Elements that are never parted, counted from the start of a parameter.

A CPU computes the end of a tensor, which fills no vector, one element after the other. In 16 bits,
and in fused kernels, that rounds otherwise than vectors do. At multiples of 64 elements, which is
two vectors of the widest kind, a range has no other such end than the whole parameter.
"""


@final
@dataclass(frozen=True, slots=True)
class Ownership:
    """The ranges of all parameters.

    Those of one type lie one after the other, in their order, and are cut by the split in units of
    64 elements: a rank's range is contiguous, and a parameter smaller than a unit has one owner.

    Attributes:
        split: what was cut by.
        units: for each parameter, rank r owns units ``units[r]`` to ``units[r + 1]`` of it.
        sizes: elements of each parameter.
    """

    split: Split
    units: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, parameters: Sequence[torch.Tensor], split: Split) -> Self:
        """Return the layout of ``parameters`` by ``split``."""
        sizes = tuple(parameter.numel() for parameter in parameters)
        units: list[tuple[int, ...]] = [()] * len(sizes)
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
            those = [i for i, parameter in enumerate(parameters) if parameter.dtype == dtype]
            counts = [max(1, -(-sizes[index] // UNIT)) for index in those]
            least = max(1, -(-split.min_bytes // (UNIT * dtype.itemsize)))
            edges = cut(sum(counts), split.parts, min_elements=least)
            starts = accumulate(counts, initial=0)
            for index, count, start in zip(those, counts, starts, strict=False):
                units[index] = tuple(min(max(edge - start, 0), count) for edge in edges)
        return cls(split, tuple(units), sizes)

    def owns(self, rank: int, index: int) -> bool:
        """Return whether ``rank`` owns a part of the parameter: of an empty one, all."""
        units = self.units[index]
        return units[rank + 1] > units[rank]

    def span(self, rank: int, index: int) -> slice:
        """Return the elements that ``rank`` owns of the parameter, in the order of memory."""
        units, size = self.units[index], self.sizes[index]
        return slice(min(units[rank] * UNIT, size), min(units[rank + 1] * UNIT, size))

    def first_owner(self, index: int) -> int:
        """Return the lowest rank that owns a part of the parameter."""
        return next(rank for rank in range(self.split.world_size) if self.owns(rank, index))


def common(one: slice, other: slice) -> slice:
    """Return the elements that two spans share; an empty span if there are none."""
    start = max(one.start, other.start)
    return slice(start, max(start, min(one.stop, other.stop)))
