"""The interface every predictor implements, and the way back from logarithms."""

from __future__ import annotations

import abc
from typing import ClassVar, Generic

import numpy as np

from .._types import FloatArray, Resources, State


class AbstractPredictor(abc.ABC, Generic[State]):
    """Predicts the next value of a positive series, one for every worker.

    The series may be speeds in samples per second or costs in seconds per sample. A predictor knows
    no units: $c$ times the values give $c$ times the forecast. Like a policy it is an immutable
    value: hyperparameters are on ``self``, and everything that changes is in ``State``, which
    consists of nested tuples and dicts of arrays and plain values without NaN. It reads no clock
    and draws random numbers only from its own seed, so the same series gives the same forecasts.

    A worker that was not measured in a step has a NaN there and keeps its forecast. Workers are
    independent: a permutation of the workers permutes the forecasts.

    Attributes:
        name: its name in configurations and reports, such as ``"ema"``.
        reads_resources: whether ``update`` uses ``resources``.
    """

    __slots__ = ()

    name: ClassVar[str] = ""
    reads_resources: ClassVar[bool] = False

    @abc.abstractmethod
    def init(self, world_size: int) -> State:
        """Return the state before the first step."""

    @abc.abstractmethod
    def update(self, state: State, values: FloatArray, resources: Resources | None = None) -> State:
        """Return the state after one more step, leaving ``state`` as it is.

        Args:
            state: from ``init`` or ``update``.
            values: the measured values, positive and finite, or NaN, ``(world_size,)``.
            resources: the free CPU and memory of the machines at the end of that step, so current
                for the next step. Most predictors ignore it.
        """

    @abc.abstractmethod
    def predict(self, state: State) -> FloatArray:
        """Return the expected values of the next step, positive, ``(world_size,)``.

        NaN for a worker that was never measured.
        """


LARGEST = 700.0
"""Past this a float's exponential is infinite, or close to the smallest there is."""


def positive(logs: FloatArray) -> FloatArray:
    """Return the exponentials, positive and finite whatever was extrapolated; NaN stays."""
    values: FloatArray = np.exp(np.clip(logs, -LARGEST, LARGEST))
    return values
