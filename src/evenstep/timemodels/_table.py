"""Step times listed size by size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from .._types import FloatArray, IntArray
from ..exceptions import invalid
from ._base import AbstractTimeModel, bisect_batch


@final
@dataclass(frozen=True, slots=True, eq=False)
class TableTime(AbstractTimeModel):
    """Step times read from a table: any curve, as long as it never falls.

    $t_r(b)$ is the entry in row $r$ and column $b$.

    Right for staircases, saturation and whatever else a profile shows. Wrong where the profile
    is noisy: it must not fall, so smooth it first (``np.maximum.accumulate`` along a row). It
    knows nothing past its last column, and says so rather than guess.

    Args:
        seconds_table: seconds of every worker at every size from 0, finite, ``(world_size, n+1)``.
            Nondecreasing along each row, and 0 in the first column.

    Raises:
        ValueError: the table has another shape, is not finite, starts elsewhere or falls; a batch
            size past its last column is asked for.
    """

    seconds_table: FloatArray

    def __post_init__(self) -> None:
        table = np.array(self.seconds_table, np.float64)
        table.flags.writeable = False
        _check(table)
        object.__setattr__(self, "seconds_table", table)  # past the frozen guard: our own array

    @property
    def world_size(self) -> int:
        return len(self.seconds_table)

    def seconds(self, batch_size: IntArray) -> FloatArray:
        last = self.seconds_table.shape[1] - 1
        if (batch_size > last).any():
            raise invalid(
                "TableTime(seconds_table=...)",
                f"reach to size {int(batch_size.max())}, which was asked for",
                f"a last size of {last}",
                "Measure further, or set the cluster's `max_batch_size`.",
            )
        found: FloatArray = self.seconds_table[np.arange(self.world_size), batch_size]
        return found

    def largest_batch(self, budget_s: float, most: IntArray) -> IntArray:
        return bisect_batch(self.seconds, budget_s, most=most)


def _check(table: FloatArray) -> None:
    name = "TableTime(seconds_table=...)"
    if table.ndim != 2 or not table.size:
        shape = "(world_size, sizes), one column per size from 0"
        raise invalid(name, f"have shape {shape}", table.shape, "Give one row per worker.")
    if not np.isfinite(table).all():
        rank = int(np.argmin(np.isfinite(table).all(axis=1)))
        remedy = "Leave out what does not fit, and cap it with `max_batch_size`."
        raise invalid(name, "be finite on every rank", f"{table[rank]} on rank {rank}", remedy)
    if (table[:, 0] != 0).any():
        rank = int(np.argmax(table[:, 0] != 0))
        remedy = "Put 0 there: a worker without samples costs nothing."
        raise invalid(name, "be 0 in the first column", f"{table[rank, 0]} on rank {rank}", remedy)
    falls = np.diff(table, axis=1) < 0
    if falls.any():
        rank, size = (int(index) for index in np.argwhere(falls)[0])
        got = f"{table[rank, size]} s at {size} and {table[rank, size + 1]} s at {size + 1}"
        remedy = "Smooth it: `np.maximum.accumulate(table, axis=1)`."
        raise invalid(name, "never fall along a row", f"{got} on rank {rank}", remedy)
