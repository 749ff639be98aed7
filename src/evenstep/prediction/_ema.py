"""An exponential moving average."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from .._types import FloatArray, Resources
from .._valid import check_fields
from ._base import AbstractPredictor


@final
@dataclass(frozen=True, slots=True)
class Ema(AbstractPredictor[dict[str, Any]]):
    r"""The mean of all values, each counting less by $1 - \alpha$ than the one after it.

    $\hat v_{k+1} = (1 - w_k) \hat v_k + w_k v_k$ with $w_k = \max(\alpha, 1/k)$ at a worker's
    $k$-th value: a plain mean until there are $1/\alpha$ values.

    With $\alpha = 1$ it is the last measured value, the naive forecast. This is the best forecast
    for a random walk without noise. But it repeats all noise: on a steady machine its error is
    $\sqrt 2$ times that of a long mean.

    Right on steady machines with jitter, of which $\sqrt{\alpha / (2 - \alpha)}$ remains, a third
    at 0.2. It is robust, and so a good fallback. Wrong if values change: it is $1/\alpha$ steps
    behind a drift, takes $2.3 / \alpha$ steps for nine tenths of a permanent change, and keeps
    $\alpha$ of every single slow step.

    Args:
        alpha: weight of the newest value, in (0, 1]. 1 is the last value.

    Raises:
        ValueError: ``alpha`` is out of range.

    References:
        R. G. Brown, *Statistical Forecasting for Inventory Control*, 1959. The plain mean at the
        start is ours.
    """

    name: ClassVar[str] = "ema"

    alpha: float = 0.2

    def __post_init__(self) -> None:
        check_fields(self, alpha=("in (0, 1]", "1 keeps no memory, less keeps more."))

    def init(self, world_size: int) -> dict[str, Any]:
        return {
            "mean": np.zeros(world_size),
            "num_steps": np.zeros(world_size, np.int64),
        }

    def update(
        self, state: dict[str, Any], values: FloatArray, resources: Resources | None = None
    ) -> dict[str, Any]:
        measured = ~np.isnan(values)
        num_steps = state["num_steps"] + measured
        weight = np.maximum(1 / np.maximum(num_steps, 1), self.alpha)
        before = np.where(num_steps > 1, state["mean"], values)
        # Not `before + weight * (values - before)`, which may round to 0.
        mean = (1 - weight) * before + weight * values
        return {"mean": np.where(measured, mean, state["mean"]), "num_steps": num_steps}

    def predict(self, state: dict[str, Any]) -> FloatArray:
        return np.where(state["num_steps"] > 0, state["mean"], np.nan)
