"""The median of the last values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from .._types import FloatArray, Resources
from .._valid import check_fields
from ._base import AbstractPredictor


@final
@dataclass(frozen=True, slots=True)
class WindowMedian(AbstractPredictor[FloatArray]):
    r"""The median of a worker's last ``window`` values, of two in the middle their mean.

    $\hat v_{k+1} = \mathrm{median}(v_k, \dots, v_{k-n+1})$; over fewer values until there are $n$.

    Right if single steps are outliers, by garbage collection, a checkpoint or a page fault: up to
    $\lceil n/2 \rceil - 1$ outliers among the last $n$ values have no effect. Wrong if values
    change: a permanent change is ignored for $n/2$ steps, and then followed completely. Under plain
    jitter it needs 1.5 times as many values as a mean for the same error.

    Args:
        window: number of values, at least 1. 1 is the last value.

    Raises:
        ValueError: ``window`` is below 1.

    References:
        J. W. Tukey, *Exploratory Data Analysis*, 1977, chapter 7 (running medians).
    """

    name: ClassVar[str] = "window-median"

    window: int = 9

    def __post_init__(self) -> None:
        check_fields(self, window=("an integer of at least 1", "9 forgives four steps."))

    def init(self, world_size: int) -> FloatArray:
        return np.zeros((self.window, world_size))  # no value is 0

    def update(
        self, state: FloatArray, values: FloatArray, resources: Resources | None = None
    ) -> FloatArray:
        shifted = np.concatenate([state[1:], values[np.newaxis]])
        return np.where(np.isnan(values), state, shifted)

    def predict(self, state: FloatArray) -> FloatArray:
        num_known = np.count_nonzero(state, axis=0)
        first = self.window - num_known  # in order, what is unknown comes before
        middle = np.stack([first + (num_known - 1) // 2, first + num_known // 2])
        low, high = np.take_along_axis(
            np.sort(state, axis=0), np.minimum(middle, self.window - 1), axis=0
        )
        return np.where(num_known > 0, low + 0.5 * (high - low), np.nan)
