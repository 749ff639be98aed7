"""The value of one period ago, for periodic load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from .._types import FloatArray, IntArray, Resources
from .._valid import check_fields
from ._base import AbstractPredictor

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
