"""By which costs to plan: those of each rank, those of all alike, or counts; noise is no reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from .._types import FloatArray
from ..policies._splits import LEAST_SAVING_S, errors_by_chance
from ..timemodels import CostEstimator
from ..timemodels._cost_model import CostModel

WORTH = 0.01  # of a step, which a new plan has to save
_LEAST_STEPS = 32  # before features are judged
_FEW_STEPS = 8  # until which ranks differ by a factor alone, and not in what of a step is fixed
_BETTER = 0.95  # of the error by counts, below which those are left for features


@final
@dataclass(frozen=True, slots=True, eq=False)
class CostChoice:
    """What a plan goes by.

    Attributes:
        model: seconds of each rank, by features; where samples are counted, by the first of them.
        by_cost: whether samples are assigned by it, and not counted.
        knows: whether it tells samples apart; until lengths are known, all cost the mean one's.
        is_apart: whether each rank has a speed of its own, and not all the same.
    """

    model: CostModel
    by_cost: bool = True
    knows: bool = True
    is_apart: bool = False

    def next(
        self,
        estimator: CostEstimator,
        recent: Sequence[FloatArray],
        *,
        by_speed: bool,
        always_by_cost: bool,
        knows: bool = True,
        differ: bool = True,
    ) -> CostChoice:
        """Return what the next plan would go by, after this one.

        Ranks are taken to be alike until the saving by their speeds exceeds a millisecond, and what
        noise alone would pretend (``errors_by_chance``); and again once it falls below half of it.
        At first they differ by a factor alone, as a few noisy steps cannot tell what of a step is
        fixed: a rank that seemed to have only fixed costs would get next to nothing, and stay so.
        Samples are counted once features predict no better than counts, and assigned by cost again
        once they do. So they are from the start where all cost the same.

        Args:
            estimator: that has a model.
            recent: work of steps, each ``(world_size, num_features)``.
            by_speed: whether ranks may differ.
            always_by_cost: whether samples are never counted.
            knows: whether lengths are known. Reports tell them of what was computed, at any time.
            differ: whether samples differ in what is known of them.
        """
        model, counted = estimator.model, estimator.by_count
        assert model is not None
        assert counted is not None
        is_judged = estimator.num_steps >= _LEAST_STEPS and not np.isnan(estimator.error)
        bar = estimator.error_by_count * (1 if self.by_cost else _BETTER)
        tells = differ or not knows
        by_cost = always_by_cost or (tells and (not is_judged or estimator.error < bar))
        if not by_cost:
            model = _by_count(counted.intercept_s, counted.slope_s[:, 0], model)
        elif not knows:
            mean = estimator.features.sum(axis=(0, 1)) / max(estimator.counts.sum(), 1)
            model = _by_count(model.intercept_s, model.slope_s @ mean, model)
        one = np.ones_like(model.slope_s)
        alike = CostModel(one[:, 0] * model.intercept_s.mean(), one * model.slope_s.mean(axis=0))
        if not (by_speed and self._pays(model, recent, estimator.uncertainty())):
            return CostChoice(alike, by_cost, knows)
        if estimator.num_steps < _FEW_STEPS:
            # At equal shares: a rank's own work may be none at all, where others took it over.
            shares = [work.mean(axis=0) for work in recent]
            each_s = np.mean([model.seconds(one) / alike.seconds(one) for one in shares], axis=0)
            model = CostModel(alike.intercept_s * each_s, alike.slope_s * each_s[:, None])
        return CostChoice(model, by_cost, knows, is_apart=True)

    def _pays(self, model: CostModel, recent: Sequence[FloatArray], error: FloatArray) -> bool:
        """Tell whether each rank's own speed saves more, against equal shares, than noise does."""
        whole = [work.sum(axis=0) for work in recent]
        equal_s = np.mean([model.seconds(work / len(error)) for work in whole], axis=0)
        slowest = int(np.argmax(equal_s))
        saving = 1 - np.mean([model.level_s(work) for work in whole]) / equal_s[slowest]
        needed = max(WORTH, LEAST_SAVING_S / equal_s[slowest])
        needed += errors_by_chance(len(error)) * error[slowest]
        return bool(saving >= (0.5 * needed if self.is_apart else needed))

    def gain(self, before: CostModel, recent: Sequence[FloatArray]) -> float:
        """Return by how much steps would be shorter than under a plan by ``before``, as a share.

        By this model, recent steps end so much later than if they were cut level; some of that,
        the plan foresaw: samples cannot be cut.
        """
        now, foreseen = [
            np.mean([one.seconds(work).max() / one.level_s(work.sum(axis=0)) for work in recent])
            for one in (self.model, before)
        ]
        return float(1 - foreseen / now)


def _by_count(intercept_s: FloatArray, each_s: FloatArray, like: CostModel) -> CostModel:
    """Return a model of the same features by which each sample takes a rank as long."""
    slope = np.zeros_like(like.slope_s)
    slope[:, 0] = each_s
    return CostModel(intercept_s, slope)
