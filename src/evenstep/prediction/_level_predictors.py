"""Predictors of a level: averages, a running median, a damped trend, a Kalman filter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from .._types import FloatArray, Resources
from .._valid import check_fields
from ._base import AbstractPredictor, positive


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


LEAST_VARIANCE = 1e-12
"""Of a reading: noise of one part in a million, so that exact readings divide nothing by 0."""


@final
@dataclass(frozen=True, slots=True)
class LocalLevel(AbstractPredictor[dict[str, Any]]):
    r"""An average of suitable length: a Kalman filter that learns both noises.

    The logarithm is modelled as a level that wanders, measured with noise:
    $y_k = m_k + \varepsilon_k$ and $m_{k+1} = m_k + \eta_k$, with variances $r$ and $q$. The
    filter is $K_k = P_k / (P_k + r)$, $\hat m_{k+1} = \hat m_k + K_k (y_k - \hat m_k)$ and
    $P_{k+1} = (1 - K_k) P_k + q$. Changes from value to value separate the noises: with
    $d_k = y_k - y_{k-1}$,

    $r = -\mathrm{E}[d_k d_{k-1}], \quad q = \mathrm{E}[d_k^2] - 2 r$,

    both cut off at 0, where the means are exponential moving averages of the values before $y_k$.
    So a single outlier counts as noise at first, and then as two opposite changes: it has little
    effect. A permanent change is followed from its second value on.

    Right on steady machines and on machines whose speed wanders, without a setting: its error is
    within 8 % of that of the best moving average for either. Wrong for about ``1 / (1 - memory)``
    steps after a permanent change, while it follows noise too. It knows neither trends nor cycles;
    on values that oscillate it is the last value.

    Args:
        memory: weight of the past in the learnt noises, per value, in [0, 1).
        first_noise: standard deviation of $\ln v$ assumed at the start, finite and
            positive: 0.03 is 3 %.

    Raises:
        ValueError: an argument is out of range.

    References:
        R. E. Kalman, 1960; A. C. Harvey, *Forecasting, Structural Time Series Models and the
        Kalman Filter*, 1989, sections 2.3 and 4.1.2 (the local level and its autocovariances).
        That they are followed on line is ours.
    """

    name: ClassVar[str] = "local-level"

    memory: float = 0.97
    first_noise: float = 0.03

    def __post_init__(self) -> None:
        check_fields(
            self,
            memory=("in [0, 1)", "0.97 looks back over about thirty values."),
            first_noise=("finite and positive", "0.03 is 3 %."),
        )

    def init(self, world_size: int) -> dict[str, Any]:
        zero, first = np.zeros(world_size), np.full(world_size, self.first_noise**2)
        return {
            "level": zero,
            "variance": first,
            "newest": zero,
            "change": zero,
            # Means of a change times itself, and times the one before.
            "own": 2.5 * first,
            "next": -first,
            "num_steps": np.zeros(world_size, np.int64),
        }

    def update(
        self, state: dict[str, Any], values: FloatArray, resources: Resources | None = None
    ) -> dict[str, Any]:
        logs, measured = np.log(values), ~np.isnan(values)
        # By what was known before: or the odd step itself would pass for wandering.
        noise = np.maximum(-state["next"], LEAST_VARIANCE)
        wander = np.maximum(state["own"] - 2 * noise, 0.0)
        before = state["variance"] + wander
        gain = before / (before + noise)
        first, fresh = state["num_steps"] == 0, self._learn(state, logs)
        fresh["level"] = np.where(first, logs, (1 - gain) * state["level"] + gain * logs)
        fresh["variance"] = np.where(first, noise, (1 - gain) * before)
        return {name: np.where(measured, fresh[name], state[name]) for name in state}

    def predict(self, state: dict[str, Any]) -> FloatArray:
        return np.where(state["num_steps"] > 0, positive(state["level"]), np.nan)

    def _learn(self, state: dict[str, Any], logs: FloatArray) -> dict[str, Any]:
        """Return what the newest values show of the noises."""
        num_steps = state["num_steps"] + 1
        change = np.where(num_steps > 1, logs - state["newest"], 0.0)
        # What is assumed at the start weighs as much as eight values.
        weight = np.maximum(1 / (num_steps + 8), 1 - self.memory)
        own = state["own"] + weight * (change**2 - state["own"]) * (num_steps > 1)
        product = change * state["change"]
        following = state["next"] + weight * (product - state["next"]) * (num_steps > 2)
        return {
            "newest": logs,
            "change": change,
            "own": own,
            "next": following,
            "num_steps": num_steps,
        }
