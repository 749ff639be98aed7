"""Classical predictors: averages, a median, a trend, a Kalman filter, periods, autoregression."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from .._types import FloatArray, IntArray, Resources, check_fields
from ._base import AbstractPredictor, positive

_EVERY = 8  # steps between two looks at the same worker
_MOST_AT_ONCE = 128  # workers looked at in one step
_LEAST_CHANGE = 1e-4  # summed squares: one change by 1 %. What never changes has every period
_LEAST_STRETCH = 20  # steps compared: fewer agree by chance


@final
@dataclass(frozen=True, slots=True)
class Seasonal(AbstractPredictor[dict[str, Any]]):
    r"""The value one period ago, for workers whose load has proved periodic; else the last one.

    The period of a worker is the lag $p$ whose mean square difference is the smallest beside that
    of neighbouring steps over the same stretch,

    $$\min_p \; \frac{\sum_{k > p} (x_k - x_{k-p})^2}{\sum_{k > p} (x_k - x_{k-1})^2},$$

    with $x$ the logarithm of the value, if the ratio is below ``evidence``: the step a period ago
    then predicts the changes since the last step. A constant with noise has a ratio of 1 at every
    lag. A smooth wave has hardly less, and a trend predicts it sooner.

    Right for loads that switch by the clock: other users' jobs, thermal cycles, evaluations. Wrong
    for loads that only look periodic: a period is found after ``overlap`` periods, and a short
    stretch may match by chance. A period beyond ``longest / overlap`` steps is never found.

    Args:
        longest: number of steps that are remembered, at least 16.
        overlap: number of periods that have to be seen, above 1.
        evidence: largest ratio that counts as periodic, in (0, 1).

    Raises:
        ValueError: an argument is out of range.

    References:
        The seasonal naive forecast. The ratio is von Neumann's (1941) at lag p against lag 1.
    """

    name: ClassVar[str] = "seasonal"

    longest: int = 384
    overlap: float = 1.5
    evidence: float = 0.3

    def __post_init__(self) -> None:
        check_fields(
            self,
            longest=("an integer of at least 16", "384 finds 256 steps."),
            overlap=("above 1", "1.5 waits half a period more."),
            evidence=("in (0, 1)", "0.3 is rarely chance."),
        )

    def init(self, world_size: int) -> dict[str, Any]:
        return {
            "num_steps": 0,
            "measured": np.zeros(world_size, np.bool_),
            # Of half the precision: it is copied at every step, and looked at now and then.
            "history": np.zeros((self.longest, world_size), np.float32),
            "period": np.zeros(world_size, np.int64),
        }

    def update(
        self, state: dict[str, Any], values: FloatArray, resources: Resources | None = None
    ) -> dict[str, Any]:
        num_steps, old, measured = state["num_steps"] + 1, state["history"], state["measured"]
        now = ~np.isnan(values)
        logs = np.where(now, np.log(np.where(now, values, 1.0)), old[-1])
        history = np.empty_like(old)
        history[:-1], history[-1] = old[1:], logs
        if (first := now & ~measured).any():
            history[:, first] = logs[first]  # as if it had always been so
        return {
            "num_steps": num_steps,
            "measured": measured | now,
            "history": history,
            "period": self._look(history, num_steps, state["period"]),
        }

    def predict(self, state: dict[str, Any]) -> FloatArray:
        history, period = state["history"], state["period"]
        rows = np.where(period > 0, len(history) - period, len(history) - 1)
        values = np.exp(history[rows, np.arange(len(period))].astype(np.float64))
        forecast: FloatArray = np.where(state["measured"], values, np.nan)
        return forecast

    def periods(self, state: dict[str, Any]) -> IntArray:
        """Return every worker's period in steps, 0 where there is none, ``(world_size,)``."""
        period: IntArray = state["period"]
        return period

    def _look(self, history: np.ndarray[Any, Any], num_steps: int, period: IntArray) -> IntArray:
        """Look at some workers, in turn, for a period."""
        known = min(num_steps, self.longest)
        largest = min(int(known / self.overlap), known - _LEAST_STRETCH)
        if largest <= _EVERY:
            return period
        turns = max(_EVERY, -(-len(period) // _MOST_AT_ONCE))
        workers = np.arange(num_steps % turns, len(period), turns)
        found = period.copy()
        if len(workers):
            series = history[-known:, workers].astype(np.float64)
            # Single odd steps are nothing that comes again: a median of three is blind to them.
            smooth = np.median(np.stack([series[:-2], series[1:-1], series[2:]]), axis=0)
            found[workers] = _period(smooth, largest, self.evidence)
        return found


def _period(series: FloatArray, largest: int, evidence: float) -> IntArray:
    """Return the best lag of ``series``, ``(num_steps, workers)``, up to ``largest``, or 0."""
    num_steps = len(series)
    centred = series - series.mean(axis=0)
    size = 1 << (2 * num_steps - 1).bit_length()
    spectrum = np.fft.rfft(centred, size, axis=0)
    product = np.fft.irfft(abs(spectrum) ** 2, size, axis=0)[:largest]  # sum of x_k x_(k-p)
    squares = np.vstack([np.zeros_like(centred[:1]), np.cumsum(centred**2, axis=0)])
    lags = np.arange(largest)
    at_lag = squares[-1] - squares[lags] + squares[num_steps - lags] - 2 * product
    changes = np.cumsum(np.diff(series, axis=0) ** 2, axis=0)
    # Of the same stretch: from step p on, against the step before.
    beside = changes[-1] - np.vstack([np.zeros((2, changes.shape[1])), changes])[lags]
    ratio = at_lag[_EVERY:] / np.maximum(beside[_EVERY:], 1e-300)
    ratio[beside[_EVERY:] < _LEAST_CHANGE] = np.inf
    least = ratio.min(axis=0)
    # The first that is about as good: twice a period is one as well, and knows less of today.
    period: IntArray = np.argmax(ratio <= least + 0.05, axis=0) + _EVERY
    return np.where(least < evidence, period, 0)


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
