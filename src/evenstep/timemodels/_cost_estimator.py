"""A cost model that is fitted step by step, and judged by what it predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np
from numpy.typing import ArrayLike

from .._types import FloatArray
from ..exceptions import invalid
from ._cost_model import CostModel, fit_costs

_MEMORY = 0.9  # of the mean error, per step
_BETTER = 0.9  # of the error by counts, below which features are of use


@final
@dataclass(frozen=True, slots=True, eq=False)
class CostEstimator:
    """Learns what samples cost on each worker from the times of steps.

    Beside the model by features it keeps one by counts, and scores both by what they predict of
    the next step: where all ranks end together, all their times are alike, and any model explains
    them. Features that predict no better than counts are of no use.

    Usage:
        costs = CostEstimator.fresh(num_features=2, kinds=[0, 0, 0, 1])
        costs = costs.observe(features, counts, seconds)  # after every step
        costs.model.seconds(features)

    Attributes:
        kinds: a number for the kind of device of each rank: ranks of one kind share what a
            feature costs, up to a factor.
        window: steps that are remembered, at least 2.
        features: of those, ``(num_steps, world_size, num_features)``.
        counts: samples of each rank, ``(num_steps, world_size)``.
        seconds: own times, ``(num_steps, world_size)``.
        num_steps: how many were observed.
        model: by features; None before the first step.
        by_count: by the number of samples alone; likewise.
        error: mean relative error of what ``model`` predicted; NaN before the second step.
        error_by_count: likewise of ``by_count``.
    """

    kinds: tuple[int, ...]
    window: int
    features: FloatArray
    counts: FloatArray
    seconds: FloatArray
    num_steps: int = 0
    model: CostModel | None = None
    by_count: CostModel | None = None
    error: float = float("nan")
    error_by_count: float = float("nan")

    @classmethod
    def fresh(cls, *, num_features: int, kinds: Sequence[int], window: int = 64) -> CostEstimator:
        """Return the estimator that has seen nothing.

        Raises:
            ValueError: ``num_features`` is not from 1 to 8, or ``window`` is below 2.
        """
        if not 1 <= num_features <= 8:
            rule, remedy = "be from 1 to 8", "Few features are told apart by few steps."
            raise invalid("CostEstimator(num_features=...)", rule, num_features, remedy)
        if window < 2:
            raise invalid(
                "CostEstimator(window=...)", "be at least 2", window, "64 is the default."
            )
        none = np.zeros((0, len(kinds)))
        return cls(tuple(kinds), window, none[..., None].repeat(num_features, 2), none, none)

    def observe(self, features: ArrayLike, counts: ArrayLike, seconds: ArrayLike) -> CostEstimator:
        """Return the estimator with one more step.

        Args:
            features: of what each rank computed, ``(world_size, num_features)``.
            counts: samples of each rank, ``(world_size,)``.
            seconds: own time of each, NaN where it is not known, ``(world_size,)``.

        Raises:
            ValueError: the shapes are others.
        """
        step = [np.asarray(one, np.float64) for one in (features, counts, seconds)]
        wanted = self.features.shape[1:], self.counts.shape[1:], self.counts.shape[1:]
        if tuple(one.shape for one in step) != wanted:
            raise invalid(
                "CostEstimator.observe(features, counts, seconds)",
                f"have the shapes {', '.join(map(str, wanted))}",
                ", ".join(str(one.shape) for one in step),
                "Give one row for each rank.",
            )
        kept = [
            np.concatenate([before, now[None]])[-self.window :]
            for before, now in zip((self.features, self.counts, self.seconds), step, strict=True)
        ]
        seen = replace(
            self,
            features=kept[0],
            counts=kept[1],
            seconds=kept[2],
            num_steps=self.num_steps + 1,
            error=_scored(self.error, self.model, step[0], step[2]),
            error_by_count=_scored(self.error_by_count, self.by_count, step[1][:, None], step[2]),
        )
        return seen._fitted()

    @property
    def is_useful(self) -> bool:
        """Whether features predict better than counts do; False until that is known."""
        return self.error < _BETTER * self.error_by_count

    def _fitted(self) -> CostEstimator:
        """Return the estimator with new models, where it is time for them."""
        if self.num_steps > 8 and self.num_steps % 4:
            return self
        if not (np.isfinite(self.seconds) & (self.seconds > 0)).any(axis=0).all():
            return self
        return replace(
            self,
            model=fit_costs(self.features, self.seconds, self.kinds),
            by_count=fit_costs(self.counts[..., None], self.seconds, self.kinds),
        )


def _scored(error: float, model: CostModel | None, work: FloatArray, took: FloatArray) -> float:
    """Return the mean error with that of one more step."""
    known = np.isfinite(took) & (took > 0)
    if model is None or not known.any():
        return error
    now = float(abs(model.seconds(work)[known] / took[known] - 1).mean())
    return now if np.isnan(error) else _MEMORY * error + (1 - _MEMORY) * now
