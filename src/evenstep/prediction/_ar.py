"""An autoregression, fitted as the values come in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from .._types import FloatArray, Resources
from .._valid import check_fields
from ._base import AbstractPredictor, positive

DOUBT = 1e-3
"""Weight of the coefficients assumed at the start, as a sum of squared logarithms: one value off
its mean by 3 %. It never fades, so that a steady worker's coefficients stay determined."""
MARGIN = math.log(2)
"""By how much a forecast may be past all values it is made from: coefficients may be explosive."""


@final
@dataclass(frozen=True, slots=True)
class Ar(AbstractPredictor[dict[str, Any]]):
    r"""The next logarithm as a weighted sum of the last ones, weights by recursive least squares.

    With $z = \ln v - \mu$, $\mu$ the mean of the past,

    $\hat z_{k+1} = \sum_{j=1}^{p} \theta_j z_{k+1-j}$,

    where $\theta$ minimises
    $\sum_k \lambda^{n-k} (z_k - \hat z_k)^2 + \delta |\theta - \theta_0|^2$ over the past. It is
    solved again after every value, from running sums. $\theta_0$ repeats the last value. A forecast
    is limited to twice the largest and half the smallest of the last $p$ values.

    Right if values oscillate: another job with a cycle, two jobs that take turns, an overshooting
    frequency governor. Two weights can follow one sine wave, and values that return to their mean
    need one weight. Wrong on steady machines for about ten values per weight, until the weights are
    known, and after jumps, which distort all weights: the more, the higher the order.

    Args:
        order: number $p$ of past values, at least 1. The cost grows with its cube.
        memory: $\lambda$, weight of the past per value, in (0, 1].

    Raises:
        ValueError: an argument is out of range.

    References:
        G. E. P. Box and G. M. Jenkins, *Time Series Analysis*, 1970, chapter 3; L. Ljung, *System
        Identification*, 2nd ed., 1999, section 11.2 (least squares with forgetting). The constant
        $\delta$ keeps its covariance from winding up.
    """

    name: ClassVar[str] = "ar"

    order: int = 2
    memory: float = 0.98

    def __post_init__(self) -> None:
        check_fields(
            self,
            order=("an integer of at least 1", "2 can hold a cycle."),
            memory=("in (0, 1]", "0.98 looks back over about fifty values."),
        )

    def init(self, world_size: int) -> dict[str, Any]:
        return {
            "logs": np.zeros((self.order, world_size)),  # the newest first
            "mean": np.zeros(world_size),
            "squares": np.zeros((self.order, self.order, world_size)),
            "products": np.zeros((self.order, world_size)),
            "weights": np.eye(self.order, 1).repeat(world_size, axis=1),
            "num_steps": np.zeros(world_size, np.int64),
        }

    def update(
        self, state: dict[str, Any], values: FloatArray, resources: Resources | None = None
    ) -> dict[str, Any]:
        newest, measured = np.log(values), ~np.isnan(values)
        num_steps = state["num_steps"] + measured
        full = measured & (state["num_steps"] >= self.order)
        # What there was before the first value would spread through the sums.
        past = np.where(full, state["logs"] - state["mean"], 0.0)
        now = np.where(full, newest - state["mean"], 0.0)
        squares = self.memory * state["squares"] + past[:, np.newaxis] * past
        products = self.memory * state["products"] + past * now
        weight = np.maximum(1 / np.maximum(num_steps, 1), 1 - self.memory)
        shifted = np.concatenate([newest[np.newaxis], state["logs"][:-1]])
        fresh = {
            "logs": shifted,
            "mean": state["mean"] + weight * (newest - state["mean"]),
            "squares": squares,
            "products": products,
            "weights": self._solve(squares, products),
            "num_steps": num_steps,
        }
        return {name: np.where(measured, fresh[name], state[name]) for name in state}

    def predict(self, state: dict[str, Any]) -> FloatArray:
        logs, mean = state["logs"], state["mean"]
        newest, full = logs[0], state["num_steps"] >= self.order
        # Until `order` values are in, the last one is repeated.
        past = np.where(full, logs, newest)
        foreseen = mean + (state["weights"] * (past - mean)).sum(axis=0)
        foreseen = np.clip(foreseen, past.min(axis=0) - MARGIN, past.max(axis=0) + MARGIN)
        known = positive(np.where(full, foreseen, newest))
        return np.where(state["num_steps"] > 0, known, np.nan)

    def _solve(self, squares: FloatArray, products: FloatArray) -> FloatArray:
        """Return the weights of least squares, ``(order, world_size)``."""
        doubt = DOUBT * np.eye(self.order)
        matrix = squares.transpose(2, 0, 1) + doubt
        right = products.T + doubt[0]
        weights: FloatArray = np.linalg.solve(matrix, right[..., np.newaxis])[..., 0].T
        return weights
