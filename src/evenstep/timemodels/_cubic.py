"""Step times on a cubic, as LBB fits them to a profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Self, final

import numpy as np

from .._types import FloatArray, IntArray
from ..exceptions import invalid
from ._base import AbstractTimeModel, alike, bisect_batch, counts
from ._least_squares import LEAST_RISE, Points, free, nonnegative, points_of
from ._profile import Profile

MOST: Final = 2**20
"""Largest `most` of a ``CubicTime``, which tabulates every size up to it."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class CubicTime(AbstractTimeModel):
    r"""Step times on LBB's cubic, held up where it falls and straight past the profile.

    With $p_r(b) = p_{3r} b^3 + p_{2r} b^2 + p_{1r} b + p_{0r}$ and $m$ the largest size of the
    profile,

    $$t_r(b) = \max(0, \max_{1 \le j \le b} p_r(j)), \quad 1 \le b \le m_r,$$

    $t_r(0) = 0$, and $t_r(b) = t_r(m_r) + d_r (b - m_r)$ past $m_r$. The slope $d_r$ is the
    steeper of the last step, $t_r(m_r) - t_r(m_r - 1)$, and the average, $t_r(m_r) / m_r$.

    Right between the sizes of a profile, for curves that bend once or twice. A cubic through noisy
    points may dip. The running maximum stays level there, so a worker looks slower than the cubic
    and never faster. (``fitted`` makes no cubic that dips.) Wrong past $m$, where a
    cubic explodes or falls: the straight line there is a guess on the slow side. Wrong for stairs.

    It tabulates $m_r + 1$ sizes per worker, 8 bytes each.

    Args:
        coefficients: $p_3, p_2, p_1, p_0$ in seconds per power of a sample, finite,
            ``(world_size, 4)``.
        most: largest size $m$ of the profile, integers in [1, 2**20],
            ``(world_size,)``.

    Raises:
        ValueError: an argument has another shape, is out of range or is not finite; a cubic is
            not positive anywhere on 1..most, or overflows there.

    References:
        Yao et al., *LBB*, J. Supercomputing 80:12247, 2024: the profile's curve (from the
        preprint). Running maximum and straight continuation are ours.
    """

    coefficients: FloatArray
    most: IntArray
    _table: FloatArray = field(init=False, repr=False)
    _slope_past: FloatArray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        coefficients = _coefficients(self.coefficients)
        most = counts("CubicTime(most=...)", self.most, least=1, most=MOST)
        alike("CubicTime(most=...)", most, other="coefficients[:, 0]", like=coefficients[:, 0])
        table, ranks = _table(coefficients, most), np.arange(len(most))
        last_s = table[ranks, most]
        _check(last_s)
        slope = np.maximum(last_s - table[ranks, most - 1], last_s / most)
        # Past the frozen guard: the fields as arrays of our own, and what they amount to.
        object.__setattr__(self, "coefficients", coefficients)
        object.__setattr__(self, "most", most)
        object.__setattr__(self, "_table", table)
        object.__setattr__(self, "_slope_past", slope)

    @classmethod
    def fitted(cls, profiles: Sequence[Profile]) -> Self:
        """Return LBB's cubic of every worker, in a form that never falls.

        Right for curves that bend gently, from sizes that cover the range. Wrong for corners and
        stairs, and of no use past the largest size, the model's ``most``.

        Args:
            profiles: what was measured on each worker.

        Raises:
            ValueError: a profile has fewer than four different sizes, or one past 2**20.
        """
        points = points_of(profiles, least=4, where="CubicTime.fitted(profiles=...)")
        most = np.array([each.sizes[-1] for each in points])
        return cls(np.array([_fit(each) for each in points]), most)

    @property
    def world_size(self) -> int:
        return len(self.most)

    def seconds(self, batch_size: IntArray) -> FloatArray:
        within = np.minimum(batch_size, self.most)
        known = self._table[np.arange(self.world_size), within]
        times: FloatArray = known + self._slope_past * (batch_size - within)
        return times

    def largest_batch(self, budget_s: float, most: IntArray) -> IntArray:
        return bisect_batch(self.seconds, budget_s, most=most)


def _coefficients(value: FloatArray) -> FloatArray:
    name, answer = "CubicTime(coefficients=...)", np.array(value, np.float64)
    answer.flags.writeable = False
    if answer.ndim != 2 or answer.shape[1] != 4 or not len(answer):
        remedy = "Give p3, p2, p1 and p0 of every worker; 0 for what a shorter fit lacks."
        raise invalid(name, "have shape (world_size, 4)", answer.shape, remedy)
    finite = np.isfinite(answer).all(axis=1)
    if not finite.all():
        rank = int(np.argmin(finite))
        got, remedy = f"{answer[rank]} on rank {rank}", "Leave out what was not measured."
        raise invalid(name, "be finite on every rank", got, remedy)
    return answer


def _table(coefficients: FloatArray, most: IntArray) -> FloatArray:
    """Return the seconds of every size up to the largest ``most`` of all workers."""
    sizes = np.arange(int(most.max()) + 1, dtype=np.float64)
    third, second, first, constant = coefficients.T[:, :, None]
    with np.errstate(over="ignore", invalid="ignore"):
        table: FloatArray = ((third * sizes + second) * sizes + first) * sizes + constant
    table[:, 0] = 0
    # Its rounding errors too: a cubic that rises may fall by a last bit as floats.
    np.maximum.accumulate(table, axis=1, out=table)
    table.flags.writeable = False
    return table


def _check(last_s: FloatArray) -> None:
    valid = np.isfinite(last_s) & (last_s > 0)
    if not valid.all():
        rank = int(np.argmin(valid))
        raise invalid(
            "CubicTime(coefficients=...)",
            "give a finite, positive time somewhere on 1..most, on every rank",
            f"{last_s[rank]} s for the largest on rank {rank}",
            "Give p3, p2, p1, p0 in this order, in seconds.",
        )


def _fit(points: Points) -> tuple[float, float, float, float]:
    r"""Return the coefficients of one worker's cubic, the highest power first.

    With $u = b / m$, $m$ the largest size measured, it is a constant plus
    $\int_0^u \beta_0 (1-v)^2 + 2 \beta_1 v (1-v) + \beta_2 v^2 \, dv$. The least-squares cubic is
    taken where it starts at 0 or above and rises all the way: $\beta_0, \beta_2 > 0$ and
    $\beta_1 \ge -\sqrt{\beta_0 \beta_2}$. Elsewhere, the best one without a negative coefficient,
    which rises too.
    """
    largest = int(points.sizes[-1])
    u = points.sizes / largest
    unit = float(np.median(points.seconds))
    shapes = np.stack([np.ones_like(u), u - u**2 + u**3 / 3, u**2 - 2 * u**3 / 3, u**3 / 3], axis=1)
    y = points.seconds / unit
    found = free(shapes, y)
    constant, first, middle, last = (float(each) * unit for each in found)
    if min(constant, first, last) <= 0 or middle < -np.sqrt(first * last):
        least = np.array([0, LEAST_RISE, LEAST_RISE, LEAST_RISE])
        found = np.maximum(nonnegative(shapes, y), least)
        constant, first, middle, last = (float(each) * unit for each in found)
    third, second = (first - 2 * middle + last) / 3, middle - first
    return third / largest**3, second / largest**2, first / largest, constant
