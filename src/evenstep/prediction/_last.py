"""The next value is the last one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from .._types import FloatArray, Resources
from ._base import AbstractPredictor


@final
@dataclass(frozen=True, slots=True)
class Last(AbstractPredictor[FloatArray]):
    r"""The last value, as it was measured: $\hat v_{k+1} = v_k$.

    Right where values wander and are measured without noise: nothing beats it on a random walk.
    Wrong under noise, all of which it repeats: its error is $\sqrt 2$ times that of a long mean
    on a steady machine. A single slow step is foreseen to come twice.

    References:
        Known as the naive forecast: R. Hyndman and G. Athanasopoulos, *Forecasting*, 3rd ed.,
        2021, section 5.2.
    """

    name: ClassVar[str] = "last"

    def init(self, world_size: int) -> FloatArray:
        return np.zeros(world_size)  # no value is 0

    def update(
        self, state: FloatArray, values: FloatArray, resources: Resources | None = None
    ) -> FloatArray:
        return np.where(np.isnan(values), state, values)

    def predict(self, state: FloatArray) -> FloatArray:
        return np.where(state > 0, state, np.nan)
