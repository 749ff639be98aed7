"""A level and a damped trend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from .._types import FloatArray, Resources
from .._valid import check_fields
from ._base import AbstractPredictor
from ._logs import positive


@final
@dataclass(frozen=True, slots=True)
class Holt(AbstractPredictor[dict[str, Any]]):
    r"""Holt's linear method with a damped trend, on the logarithm of the values.

    With $y = \ln v$, and $e_k = y_k - (l_{k-1} + \phi b_{k-1})$ what the forecast was off by:

    $l_k = y_k - (1 - \alpha) e_k, \quad b_k = \phi b_{k-1} + \alpha \beta e_k, \quad
    \hat v_{k+1} = \exp(l_k + \phi b_k)$.

    In the logarithm a trend is a percentage per step, and no forecast falls to 0. If values grow by
    a constant $g$ per step, forecasts are behind by
    $g (1 - \phi) / (\alpha (1 - \phi + \beta \phi))$, 0.9 steps of growth with the defaults; an
    average with the same $\alpha$ is behind by $g / \alpha$.

    Right on drifts over tens of steps: a machine that warms up, another job that grows. Wrong on
    steady machines, where the trend is noise and adds a tenth to the error, and on values that
    oscillate, where it overshoots.

    Args:
        alpha: weight of the newest value in the level, in (0, 1].
        beta: weight of the newest change of level in the trend, in [0, 1]. 0 is an average.
        damping: share $\phi$ of the trend that is left after each step, in [0, 1].

    Raises:
        ValueError: an argument is out of range.

    References:
        C. C. Holt, 1957; damped: E. Gardner and E. McKenzie, *Management Science* 31, 1985, in
        its error-correction form.
    """

    name: ClassVar[str] = "holt"

    alpha: float = 0.4
    beta: float = 0.2
    damping: float = 0.9

    def __post_init__(self) -> None:
        check_fields(
            self,
            alpha=("in (0, 1]", "1 keeps no memory."),
            beta=("in [0, 1]", "0 leaves no trend."),
            damping=("in [0, 1]", "0 leaves no trend."),
        )

    def init(self, world_size: int) -> dict[str, Any]:
        return {
            "level": np.zeros(world_size),
            "trend": np.zeros(world_size),
            "num_steps": np.zeros(world_size, np.int64),
        }

    def update(
        self, state: dict[str, Any], values: FloatArray, resources: Resources | None = None
    ) -> dict[str, Any]:
        logs, measured = np.log(values), ~np.isnan(values)
        error = np.where(state["num_steps"] > 0, logs - self._expected(state), 0.0)
        fresh = {
            "level": logs - (1 - self.alpha) * error,
            "trend": self.damping * state["trend"] + self.alpha * self.beta * error,
            "num_steps": state["num_steps"] + 1,
        }
        return {name: np.where(measured, fresh[name], state[name]) for name in state}

    def predict(self, state: dict[str, Any]) -> FloatArray:
        return np.where(state["num_steps"] > 0, positive(self._expected(state)), np.nan)

    def _expected(self, state: dict[str, Any]) -> FloatArray:
        expected: FloatArray = state["level"] + self.damping * state["trend"]
        return expected
