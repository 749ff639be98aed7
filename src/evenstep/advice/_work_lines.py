"""How the time of each rank follows its work, from steps in which only the work varied."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, final

import numpy as np

from .._types import FloatArray
from ..timemodels._cost_model import CostModel, fit_costs
from ._watched_steps import WatchedSteps

ALIKE: Final = 0.01  # relative deviation of the work, below which batches count as alike
_CERTAIN = 0.1  # of a rank's time: the error of its fixed part, past which the fit is not used
_CONVEX = 0.1  # of the time: the quadratic part that is more than noise
_BLOCK = 50  # steps in which a rank keeps its pace


@final
@dataclass(frozen=True, slots=True, eq=False)
class WorkLines:
    r"""Own times $t_{kr} = p_{kr} \, \ell_{kr} \, (a_r + s_r x_{kr})$ of rank $r$ in step $k$.

    $x$ is its work: $z + q z^2 / n$ from the size $z$ of its batch of $n$ samples, as attention
    has it where batches are padded, or the number of samples where sizes are not known. The pace
    $p$ is the median of what is left in 50 steps, so it follows a rank that gets slower. Luck
    $\ell$ is the rest. If the quadratic part is more than a tenth of the time, a few long samples
    cost more than many short ones of the same size; then luck counts as work.

    Attributes:
        work: $x$, ``(num_steps, world_size)``.
        intercept_s: $a$, ``(world_size,)``.
        slope_s: $s$, likewise.
        pace: $p$, ``(num_steps, world_size)``.
        luck: likewise.
        is_size: whether work comes from sizes.
        is_certain: whether $a$ and $s$ were told apart by the work. If not, all of the time is
            taken for work.
    """

    work: FloatArray
    intercept_s: FloatArray
    slope_s: FloatArray
    pace: FloatArray
    luck: FloatArray
    is_size: bool
    is_certain: bool

    @classmethod
    def of(cls, seen: WatchedSteps) -> WorkLines:
        r"""Return the lines of ranks as they were seen.

        In plain training every rank has as many samples in nearly every step. So the fixed part
        $a_r$ is known where sizes differ enough: where the standard error of $s_r \bar x_r$ is at
        most a tenth of the rank's time, on every rank. Otherwise $a_r = 0$. What follows from it is
        right whenever slow ranks are slower in the fixed part too: from $t_r = v_r (a + s x_r)$
        follows that all end together at $(W a + s \sum_r x_r) / \sum_r 1 / v_r$, which depends on
        the sum of fixed and other parts only, as long as no fixed part outlasts the step.
        """
        is_size = bool((seen.size > 0).all())
        took = seen.compute_s
        work, is_convex = _work(seen) if is_size else (np.maximum(seen.num_samples, 1.0), False)
        fit = fit_costs(work[..., None], took, [0] * seen.world_size)
        is_certain = _error(fit, work, took) <= _CERTAIN
        if not is_certain:
            proportional = np.median(took, axis=0) / np.median(work, axis=0)
            fit = CostModel(np.zeros(seen.world_size), proportional[:, None])
        lines = _paced(fit, work, took, is_size=is_size, is_certain=is_certain)
        return lines.without_luck() if is_certain and is_convex else lines

    def of_equal_slopes(self) -> WorkLines:
        """Return the other extreme of what is not told: slow ranks are slower in ``a`` alone.

        As one that does something of fixed length in every step. Then its samples help others
        less when they go.
        """
        typical = np.median(self.work, axis=0)
        seconds = self.intercept_s + self.slope_s * typical
        slope = np.full_like(seconds, (seconds / typical).min())
        fit = CostModel(np.maximum(seconds - slope * typical, 0.0), slope[:, None])
        return _paced(fit, self.work, self.took_s, is_size=self.is_size, is_certain=False)

    def without_luck(self) -> WorkLines:
        """Return them with work that explains all of the times."""
        seconds = self.took_s / self.pace
        work = np.maximum((seconds - self.intercept_s) / self.slope_s, 1e-3 * self.work)
        return replace(self, work=work, luck=np.ones_like(work))

    @property
    def took_s(self) -> FloatArray:
        """Own times, as they were, ``(num_steps, world_size)``."""
        return self.with_work(self.work)

    @property
    def spread(self) -> float:
        """Relative deviation of the work of one rank, rare short batches left out."""
        return spread_of(self.work)

    def with_work(self, work: FloatArray) -> FloatArray:
        r"""Return own times with other work in the same steps; none for a rank without.

        Whatever befell a rank in a step would have befallen it with any work.
        """
        seconds: FloatArray = self.pace * self.luck * (self.intercept_s + self.slope_s * work)
        return np.where(work > 0, seconds, 0.0)

    def levelled(self) -> FloatArray:
        r"""Return the work of ranks that all end together, by what is known before the step.

        $x_{kr} = \max(0, (T_k / p_{kr} - a_r) / s_r)$ with $\sum_r x_{kr}$ as it was.
        """
        start, cost = self.pace * self.intercept_s, self.pace * self.slope_s
        total = self.work.sum(axis=1, keepdims=True)
        order = np.argsort(start, axis=1)
        start_up = np.take_along_axis(start, order, axis=1)
        cost_up = np.take_along_axis(cost, order, axis=1)
        ready = (total + np.cumsum(start_up / cost_up, axis=1)) / np.cumsum(1 / cost_up, axis=1)
        # The last rank to take part is the last that starts before the level of those up to it.
        last = (ready > start_up).sum(axis=1, keepdims=True) - 1
        level = np.take_along_axis(ready, last, axis=1)
        work: FloatArray = np.maximum((level - start) / cost, 0.0)
        return work


def spread_of(values: FloatArray) -> float:
    """Return the relative deviation of a column as medians see it; the median of all columns."""
    usual = np.median(values, axis=0)
    return float(np.median(1.4826 * np.median(abs(values - usual), axis=0) / usual))


def _work(seen: WatchedSteps) -> tuple[FloatArray, bool]:
    """Return the work of sizes, and whether a good part of it is quadratic."""
    size, num = seen.size, seen.num_samples
    # Tokens in one row have as many "samples": how many there are is not known then.
    is_known = (num > 0).all() and spread_of(num) < ALIKE
    features = np.stack([size, size**2 / (num if is_known else 1.0)], axis=2)
    fit = fit_costs(features, seen.compute_s, [0] * seen.world_size)
    linear, quadratic = fit.slope_s.sum(axis=0) / fit.slope_s.sum()
    work = linear * features[..., 0] + quadratic * features[..., 1]
    curved = np.median(fit.slope_s[:, 1] * features[..., 1] / seen.compute_s)
    return (work, True) if curved > _CONVEX else (size, False)


def _paced(
    fit: CostModel, work: FloatArray, took: FloatArray, *, is_size: bool, is_certain: bool
) -> WorkLines:
    left = took / np.maximum(fit.seconds(work[..., None]), 1e-12)
    pace = np.empty_like(left)
    for block in np.array_split(np.arange(len(left)), max(1, len(left) // _BLOCK)):
        pace[block] = np.median(left[block], axis=0)
    return WorkLines(
        work, fit.intercept_s, fit.slope_s[:, 0], pace, left / pace, is_size, is_certain
    )


def _error(fit: CostModel, work: FloatArray, took: FloatArray) -> float:
    """Return the largest standard error of the part that follows the work, of a rank's time."""
    spread, mean = work.std(axis=0), work.mean(axis=0)
    if (spread < ALIKE * mean).any():
        return float("inf")
    noise = abs(fit.seconds(work[..., None]) / took - 1)
    noise = 1.4826 * np.median(noise, axis=0)
    return float((noise * mean / spread).max() / np.sqrt(len(work)))
