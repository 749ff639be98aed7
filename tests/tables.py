"""Step times of any curve, as a table."""

from dataclasses import dataclass

import numpy as np

from evenstep.timemodels import AbstractTimeModel, bisect_batch


@dataclass(frozen=True, eq=False)
class TableTime(AbstractTimeModel):
    """The entry in row ``rank`` and column ``batch_size``, ``(world_size, n + 1)``."""

    seconds_table: np.ndarray

    @property
    def world_size(self):
        return len(self.seconds_table)

    def seconds(self, batch_size):
        return self.seconds_table[np.arange(self.world_size), batch_size]

    def largest_batch(self, budget_s, most):
        return bisect_batch(self.seconds, budget_s, most=most)
