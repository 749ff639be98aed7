"""Straight lines through noisy points that wander: a bank of Kalman filters per worker."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from .._types import FloatArray
from ._trust import Mask

INTERCEPT_DRIFT = 0.002
"""Relative standard deviation, per step, by which a fixed cost wanders."""


@dataclass(frozen=True, slots=True, eq=False)
class Lines:
    """One line ``intercept_s + slope_s * batch`` per model and worker, and how sure it is.

    All arrays are ``(num_models, world_size)``.

    Attributes:
        intercept_s: fixed cost in seconds, at least 0.
        slope_s: cost per sample in seconds, positive once measured.
        var_intercept, covariance, var_slope: of the errors of the two.
        noise: relative standard deviation of a single step, learnt.
        score: log-likelihood of the recent steps.
    """

    intercept_s: FloatArray
    slope_s: FloatArray
    var_intercept: FloatArray
    covariance: FloatArray
    var_slope: FloatArray
    noise: FloatArray
    score: FloatArray

    def at(self, batch: FloatArray) -> FloatArray:
        """Return the seconds expected for ``batch``, per model."""
        return self.intercept_s + self.slope_s * batch

    def variance(self, batch: FloatArray) -> FloatArray:
        """Return the variance of those seconds, the noise of a single step left out."""
        variance = self.var_intercept + 2 * batch * self.covariance + batch**2 * self.var_slope
        return np.maximum(variance, 0.0)

    def weights(self) -> FloatArray:
        """Return each model's share in the estimate, summing to 1 over the models."""
        likelihood = np.exp(self.score - self.score.max(axis=0))
        weights: FloatArray = likelihood / likelihood.sum(axis=0)
        return weights

    def plain(self) -> dict[str, Any]:
        """Return the arrays by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def where(self, mask: Mask, other: Lines) -> Lines:
        """Return ``self`` where ``mask`` holds, else ``other``."""
        mine, theirs = self.plain(), other.plain()
        return Lines(**{name: np.where(mask, mine[name], theirs[name]) for name in mine})


def through(batch: FloatArray, seconds: FloatArray, *, doubt: float, lines: Lines) -> Lines:
    """Return lines through the origin and one point, with an intercept unknown up to ``doubt``."""
    var_intercept = np.broadcast_to((doubt * seconds) ** 2, lines.noise.shape)
    return Lines(
        intercept_s=np.zeros_like(lines.noise),
        slope_s=np.broadcast_to(seconds / batch, lines.noise.shape),
        var_intercept=var_intercept,
        covariance=-var_intercept / batch,
        var_slope=(var_intercept + (lines.noise * seconds) ** 2) / batch**2,
        noise=lines.noise,
        score=np.zeros_like(lines.score),
    )


def wander(lines: Lines, batch: FloatArray, drifts: FloatArray) -> Lines:
    """Return ``lines`` a step later: where they were, and less sure of it."""
    return Lines(
        intercept_s=lines.intercept_s,
        slope_s=lines.slope_s,
        var_intercept=lines.var_intercept + (INTERCEPT_DRIFT * lines.at(batch)) ** 2,
        covariance=lines.covariance,
        var_slope=lines.var_slope + (drifts * lines.slope_s) ** 2,
        noise=lines.noise,
        score=lines.score,
    )


def loosen(lines: Lines, batch: FloatArray, seconds: FloatArray, *, where: Mask) -> Lines:
    """Return ``lines`` ready to follow a jump: the slope may be off by all of it."""
    opened = np.where(where, ((seconds - lines.at(batch)) / batch) ** 2, 0.0)
    values = lines.plain()
    values["var_slope"] = lines.var_slope + opened
    return Lines(**values)


def correct(lines: Lines, batch: FloatArray, seconds: FloatArray, *, contrast: Mask) -> Lines:
    """Return ``lines`` corrected by one point each, noise and score left as they are.

    The Kalman gain where ``contrast`` says that the batch has just changed enough to tell the
    fixed cost from the cost per sample. Elsewhere all of the correction goes to the slope: as a
    balancer keeps times level while batches follow the speeds, a slope that drifts steadily
    would otherwise pass for a large intercept, with next to no slope, within 200 steps.
    """
    spread = lines.variance(batch)
    noise = (lines.noise * lines.at(batch)) ** 2
    total = spread + noise
    of_intercept = lines.var_intercept + batch * lines.covariance
    of_slope = lines.covariance + batch * lines.var_slope
    to_intercept = np.where(contrast, of_intercept / total, 0.0)
    to_slope = np.where(contrast, of_slope / total, spread / total / batch)

    # Joseph's form of the covariance, which holds for any gain.
    keep, cross = 1 - to_intercept, -to_intercept * batch
    back, stay = -to_slope, 1 - to_slope * batch
    first = (
        keep * lines.var_intercept + cross * lines.covariance,
        keep * lines.covariance + cross * lines.var_slope,
    )
    second = (
        back * lines.var_intercept + stay * lines.covariance,
        back * lines.covariance + stay * lines.var_slope,
    )
    surprise = seconds - lines.at(batch)
    intercept = lines.intercept_s + to_intercept * surprise
    slope = lines.slope_s + to_slope * surprise
    # Kept possible: a positive time, of which the fixed cost is neither negative nor nearly all.
    level = np.maximum(intercept + slope * batch, 0.05 * seconds)
    intercept = np.clip(intercept, 0.0, 0.9 * level)
    return Lines(
        intercept_s=intercept,
        slope_s=(level - intercept) / batch,
        var_intercept=first[0] * keep + first[1] * cross + to_intercept**2 * noise,
        covariance=first[0] * back + first[1] * stay + to_intercept * to_slope * noise,
        var_slope=second[0] * back + second[1] * stay + to_slope**2 * noise,
        noise=lines.noise,
        score=lines.score,
    )


def grade(
    lines: Lines, batch: FloatArray, seconds: FloatArray, *, rate: FloatArray, memory: float
) -> Lines:
    """Return ``lines`` with noise and score updated by how well they foresaw one point each."""
    expected = lines.at(batch)
    spread = lines.variance(batch)
    total = spread + (lines.noise * expected) ** 2
    surprise2 = (seconds - expected) ** 2
    # E[surprise * residual] is the variance of the noise for the optimal gain.
    share = (lines.noise * expected) ** 2 / total
    sample = np.minimum(share * surprise2 / expected**2, 9 * lines.noise**2)
    noise2 = lines.noise**2 + rate * share * (sample - lines.noise**2)
    likelihood = -0.5 * (np.log(total / seconds**2) + np.minimum(surprise2 / total, 16.0))
    values = lines.plain()
    values["noise"] = np.sqrt(np.maximum(noise2, 0.002**2))
    values["score"] = memory * lines.score + likelihood
    return Lines(**values)
