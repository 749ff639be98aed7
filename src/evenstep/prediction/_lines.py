"""Straight lines through noisy points that wander: a bank of Kalman filters per worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from .._types import FloatArray
from ._trust import Mask

INTERCEPT_DRIFT = 0.002
"""Relative standard deviation, per step, by which a fixed cost wanders."""

NAMES: Final = (
    "intercept_s",
    "slope_s",
    "var_intercept",
    "covariance",
    "var_slope",
    "noise",
    "score",
)


class _Row:
    """The row of ``Lines.values`` that goes by the attribute's name, as a view to read or fill."""

    def __set_name__(self, owner: type[Lines], name: str) -> None:
        self._index = NAMES.index(name)

    def __get__(self, lines: Lines, owner: type[Lines]) -> FloatArray:
        row: FloatArray = lines.values[self._index]
        return row


@dataclass(frozen=True, slots=True, eq=False)
class Lines:
    """One line ``intercept_s + slope_s * batch`` per model and worker, and how sure it is.

    Attributes:
        values: all there is to know, stacked in the order of ``NAMES``,
            ``(7, num_models, world_size)``, and what a policy's state holds. In one array, since
            what a step costs is the number of its operations; the others are views of it,
            ``(num_models, world_size)``.
        intercept_s: fixed cost in seconds, at least 0.
        slope_s: cost per sample in seconds, positive once measured.
        var_intercept, covariance, var_slope: of the errors of the two.
        noise: relative standard deviation of a single step, learnt.
        score: log-likelihood of the recent steps.
    """

    values: FloatArray

    intercept_s = _Row()
    slope_s = _Row()
    var_intercept = _Row()
    covariance = _Row()
    var_slope = _Row()
    noise = _Row()
    score = _Row()

    def at(self, batch: FloatArray) -> FloatArray:
        """Return the seconds expected for ``batch``, per model."""
        return self.intercept_s + self.slope_s * batch

    def variance(self, batch: FloatArray) -> FloatArray:
        """Return the variance of those seconds, the noise of a single step left out."""
        variance = self.var_intercept + batch * (2 * self.covariance + batch * self.var_slope)
        return np.maximum(variance, 0.0)

    def weights(self) -> FloatArray:
        """Return each model's share in the estimate, summing to 1 over the models."""
        likelihood = np.exp(self.score - self.score.max(axis=0))
        weights: FloatArray = likelihood / likelihood.sum(axis=0)
        return weights

    def copy(self) -> Lines:
        """Return the same lines, to be written to."""
        return Lines(self.values.copy())

    def with_noise(self, noise: FloatArray, *, where: Mask) -> Lines:
        """Return the same lines, with ``noise`` where ``where`` holds."""
        if not where.any():
            return self
        lines = self.copy()
        lines.noise[:] = np.where(where, noise, self.noise)
        return lines

    def where(self, mask: Mask, other: Lines) -> Lines:
        """Return ``self`` where ``mask`` holds, else ``other``."""
        return Lines(np.where(mask, self.values, other.values))


@dataclass(frozen=True, slots=True, eq=False)
class Residuals:
    """One step of every worker, beside what the lines foresaw of it.

    Worked out once a step, because every rule below asks for it.

    Attributes:
        batch: sizes, at least 1, ``(world_size,)``.
        seconds: what they took, likewise.
        expected: what they should have taken, ``(num_models, world_size)``.
        surprise: the one less the other, likewise.
        spread: variance of ``expected``, likewise.
        noise: variance that a single step adds to it, likewise.
        total: the two variances together, likewise.
    """

    batch: FloatArray
    seconds: FloatArray
    expected: FloatArray
    surprise: FloatArray
    spread: FloatArray
    noise: FloatArray
    total: FloatArray


def read(lines: Lines, batch: FloatArray, seconds: FloatArray) -> Residuals:
    """Return a step's reading beside what ``lines`` foresaw."""
    expected, spread = lines.at(batch), lines.variance(batch)
    noise = (lines.noise * expected) ** 2
    return Residuals(batch, seconds, expected, seconds - expected, spread, noise, spread + noise)


def through(batch: FloatArray, seconds: FloatArray, *, doubt: float, lines: Lines) -> Lines:
    """Return lines through the origin and one point, with an intercept unknown up to ``doubt``."""
    start = Lines(np.zeros(lines.values.shape))
    start.slope_s[:] = seconds / batch
    start.var_intercept[:] = (doubt * seconds) ** 2
    start.covariance[:] = -start.var_intercept / batch
    start.var_slope[:] = (start.var_intercept + (lines.noise * seconds) ** 2) / batch**2
    start.noise[:] = lines.noise
    return start


def wander(lines: Lines, batch: FloatArray, drifts: FloatArray) -> Lines:
    """Return ``lines`` a step later: where they were, and less sure of it."""
    later = lines.copy()
    later.var_intercept[:] += (INTERCEPT_DRIFT * lines.at(batch)) ** 2
    later.var_slope[:] += (drifts * lines.slope_s) ** 2
    return later


def loosen(lines: Lines, reading: Residuals, *, where: Mask) -> Lines:
    """Return ``lines`` ready to follow a jump: the slope may be off by all of it."""
    opened = lines.copy()
    opened.var_slope[:] += np.where(where, (reading.surprise / reading.batch) ** 2, 0.0)
    return opened


def correct(lines: Lines, reading: Residuals, *, contrast: Mask) -> Lines:
    """Return ``lines`` corrected by one reading, noise and score left as they are.

    The Kalman gain where ``contrast`` says that the batch has just changed enough to tell the
    fixed cost from the cost per sample. Elsewhere the whole line is scaled: a worker that is
    slower is slower in all that it does, as far as a single size can tell. As a balancer keeps
    times level while batches follow the speeds, the Kalman gain would take a slope that drifts
    steadily for a large intercept, with next to no slope, within 200 steps.
    """
    batch, total = reading.batch, reading.total
    gain = reading.spread / total / np.maximum(reading.expected, 1e-300)
    to_intercept, to_slope = gain * lines.intercept_s, gain * lines.slope_s
    if contrast.any():
        of_intercept = lines.var_intercept + batch * lines.covariance
        of_slope = lines.covariance + batch * lines.var_slope
        to_intercept = np.where(contrast, of_intercept / total, to_intercept)
        to_slope = np.where(contrast, of_slope / total, to_slope)

    # Joseph's form of the covariance, which holds for any gain. Both halves of the first product
    # at once: the variances lie in `values` as (intercept, both), (both, slope).
    keep, cross = 1 - to_intercept, -to_intercept * batch
    back, stay = -to_slope, 1 - to_slope * batch
    upper, lower = lines.values[2:4], lines.values[3:5]
    first = keep * upper + cross * lower
    second = back * upper + stay * lower

    after, noise = lines.copy(), reading.noise
    after.var_intercept[:] = first[0] * keep + first[1] * cross + to_intercept**2 * noise
    after.covariance[:] = first[0] * back + first[1] * stay + to_intercept * to_slope * noise
    after.var_slope[:] = second[0] * back + second[1] * stay + to_slope**2 * noise

    intercept = lines.intercept_s + to_intercept * reading.surprise
    slope = lines.slope_s + to_slope * reading.surprise
    # Kept possible: a positive time, a fixed cost that is not negative, and a slope that one
    # reading does not take away: at a batch of 1 there is next to nothing of it to be seen.
    level = np.maximum(intercept + slope * batch, 0.05 * reading.seconds)
    # Nor a thousand, each by nine tenths: below a share of the time it would be lost in rounding.
    slope = np.maximum(slope, np.maximum(0.1 * lines.slope_s, 1e-3 * level / batch))
    after.intercept_s[:] = np.maximum(level - slope * batch, 0.0)
    after.slope_s[:] = (level - after.intercept_s) / batch
    return after


def grade(lines: Lines, reading: Residuals, *, rate: FloatArray, memory: float) -> Lines:
    """Return ``lines`` with noise and score updated by how well they foresaw the reading.

    As the noise rises, so does the doubt about the line.
    """
    surprise2, before2 = reading.surprise**2, lines.noise**2
    # E[surprise * residual] is the variance of the noise for the optimal gain.
    share = reading.noise / reading.total
    sample = np.minimum(share * surprise2 / reading.expected**2, 9 * before2)
    noise2 = before2 + rate * share * (sample - before2)
    likelihood = -0.5 * (
        np.log(reading.total / reading.seconds**2) + np.minimum(surprise2 / reading.total, 16.0)
    )
    graded = lines.copy()
    graded.noise[:] = np.sqrt(np.maximum(noise2, 0.002**2))
    # Noise above what was assumed so far was in the earlier readings as well.
    more = np.maximum(graded.noise**2 / before2 - 1, 0.0)
    graded.var_slope[:] += more * reading.spread / reading.batch**2
    graded.score[:] = memory * lines.score + likelihood
    return graded
