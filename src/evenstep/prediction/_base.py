"""The interface every predictor implements."""

from __future__ import annotations

import abc
from typing import ClassVar, Generic

from .._types import FloatArray, Resources, State


class AbstractPredictor(abc.ABC, Generic[State]):
    """Foresees the next value of a positive series, one for every worker.

    The series may be speeds in samples per second or costs in seconds per sample: a predictor
    knows no units, and gives $c$ times the forecast for $c$ times the values. Like a policy it is
    an immutable value: hyperparameters live on ``self``, everything that changes lives in
    ``State``, nested tuples and dicts of arrays and plain values, none of them NaN. It reads no
    clock and draws no random numbers but by a seed of its own, so the same series gives the same
    forecasts.

    A worker that was not measured in a step has a NaN there and keeps its forecast. Workers do
    not see each other: a permutation of the workers permutes the forecasts.

    Attributes:
        name: what configurations and reports call it, such as ``"ema"``.
        reads_resources: whether ``update`` makes use of ``resources``.
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
            values: what was measured, positive and finite, or NaN, ``(world_size,)``.
            resources: what the machines have to spare now, at the end of that step: current as
                to the step to come. Most predictors ignore it.
        """

    @abc.abstractmethod
    def predict(self, state: State) -> FloatArray:
        """Return the values expected of the next step, positive, ``(world_size,)``.

        NaN for a worker that was never measured.
        """
