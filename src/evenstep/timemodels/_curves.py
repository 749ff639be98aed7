r"""Step times against the batch: a straight line, one that begins flat, a cubic.

All fits minimise the squared relative errors, $\sum_i (t(b_i) / \tau_i - 1)^2$: noise of a step
grows with its length. Of several measurements at one size the median counts. Fixed costs are at
least 0 and slopes positive, because a slope of 0 would make samples free: a profile that does not
rise gets a slope of a thousandth of its typical time per largest size, so nothing past that size
should be believed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Self, final

import numpy as np
from numpy.typing import NDArray

from .._types import FloatArray, IntArray, check_ranks, fill, own
from ..exceptions import invalid
from ._base import AbstractTimeModel, Profile, alike, bisect_batch, costs, counts

LEAST_RISE: Final = 1e-3
"""Share of a typical time by which every fitted curve rises at the least, up to the last size."""


def medians(profile: Profile) -> Profile:
    """Return a worker's profile with one point per size, the median of its measurements."""
    sizes, at = np.unique(profile.sizes, return_inverse=True)
    return Profile(sizes, [float(np.median(profile.seconds[at == i])) for i in range(len(sizes))])


def points_of(profiles: Sequence[Profile], *, least: int, where: str) -> list[Profile]:
    """Return every worker's profile with one point per size.

    Args:
        profiles: one for each worker.
        least: how many different sizes a curve needs.
        where: whose argument they are, for the error.

    Raises:
        ValueError: there is none, or one has fewer different sizes.
    """
    points = list(map(medians, profiles))
    if not points:
        raise invalid(where, "hold a profile for each worker", "none", "Measure each worker.")
    for rank, each in enumerate(points):
        if len(each.sizes) < least:
            rule = f"hold at least {least} different sizes on rank {rank}"
            raise invalid(where, rule, each.sizes.tolist(), "Measure more sizes.")
    return points


def lines_through(x: FloatArray, y: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    r"""Return for each row of ``x`` the line that errs least, relative to ``y``.

    Its intercept $a$, its slope $c$ and the mean of its squared relative errors, all
    ``(num_candidates,)``.

    Minimises $\sum_i ((a + c x_i) / y_i - 1)^2$ over $a \ge 0$ and $c \ge c_0$, with $c_0$ so
    small that the line rises by ``LEAST_RISE`` of a typical ``y``.

    Args:
        x: at least 0, and positive somewhere on each row, ``(num_candidates, num)``.
        y: positive, ``(num,)``.
    """
    unit = float(np.median(y))
    y = y / unit
    weight = y**-2 / (y**-2).sum()
    mean_x, mean_y = x @ weight, float(y @ weight)
    off = x - mean_x[:, None]
    spread = off**2 @ weight
    free = np.divide(off @ (weight * y), spread, out=np.zeros(len(x)), where=spread > 0)
    least = LEAST_RISE * mean_y / x.max(axis=1)
    # The best without bounds, on either bound; what the first breaks, one of the others meets.
    slope = np.stack([free, x @ (weight * y) / (x**2 @ weight), least])
    intercept = np.stack([mean_y - free * mean_x, np.zeros(len(x)), mean_y - least * mean_x])
    loss = ((intercept[..., None] + slope[..., None] * x) / y - 1) ** 2
    score = np.where((intercept >= 0) & (slope >= least), loss.mean(axis=-1), np.inf)
    best = score.argmin(axis=0), np.arange(len(x))
    return intercept[best] * unit, slope[best] * unit, score[best]


def first_best(loss: FloatArray) -> int:
    """Return the first candidate that no other beats by more than rounding."""
    return int(np.argmax(loss <= loss.min() * (1 + 1e-9) + 1e-18))


def free(columns: FloatArray, y: FloatArray) -> FloatArray:
    """Return the coefficients whose sum of columns errs least relative to ``y``, of any sign."""
    found = np.linalg.lstsq(columns / y[:, None], np.ones(len(y)), rcond=None)[0]
    return found.astype(np.float64)


def nonnegative(columns: FloatArray, y: FloatArray) -> FloatArray:
    r"""Return the coefficients, none negative, whose sum of columns errs least relative to ``y``.

    Tries every subset of the columns, so there should be few.

    Args:
        columns: ``(num, num_columns)``, with no more columns than rows.
        y: positive, ``(num,)``.
    """
    num_columns = columns.shape[1]
    best, least = np.zeros(num_columns), np.inf
    for count in range(1, num_columns + 1):
        for subset in itertools.combinations(range(num_columns), count):
            some = columns[:, subset]
            found = free(some, y)
            loss = float(((some @ found / y - 1) ** 2).sum())
            if (found >= 0).all() and loss < least:
                best, least = np.zeros(num_columns), loss
                best[list(subset)] = found
    return best


NUM_CANDIDATES: Final = 256
"""Knees tried at once, each by a fit of its own."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class PiecewiseTime(AbstractTimeModel):
    r"""Step times of a GPU: the same for any batch that does not fill it, then rising.

    $t_r(b) = f_r + c_r \max(b - s_r, 0)$ for $b \ge 1$, and $t_r(0) = 0$.

    Right if parallel lanes idle until the batch fills them. Real devices have a gentle bend where
    this has a corner. With $s = 0$ it is an ``AffineTime``, as for a CPU, so workers of both kinds
    fit into one model. Kernels that compute whole tiles only are what a `granularity` in the
    cluster is for. The model knows nothing of memory: use the cluster's `max_batch_size`.

    Args:
        flat_s: seconds $f$ of any batch up to saturation, finite and at least 0, ``(world_size,)``.
        saturation: samples $s$ that fill the device, integers of at least 0, ``(world_size,)``.
            At 0, $f$ is the fixed cost of a step.
        slope_s: cost $c$ in seconds of one sample past saturation, finite and at least 0,
            ``(world_size,)``. At 0 every batch takes as long as one sample.

    Raises:
        ValueError: an argument has no or another shape, is out of range or is not finite.

    References:
        arXiv 1806.02508 (LB-BSP), the curve of GPUs: flat to saturation, then linear.
    """

    flat_s: FloatArray
    saturation: IntArray
    slope_s: FloatArray
    _past: AffineTime = field(init=False, repr=False)

    def __post_init__(self) -> None:
        flat = costs("PiecewiseTime(flat_s=...)", self.flat_s)
        saturation = counts("PiecewiseTime(saturation=...)", self.saturation, least=0)
        slope = costs("PiecewiseTime(slope_s=...)", self.slope_s)
        alike("PiecewiseTime(saturation=...)", saturation, other="flat_s", like=flat)
        alike("PiecewiseTime(slope_s=...)", slope, other="flat_s", like=flat)
        fill(self, flat_s=flat, saturation=saturation, slope_s=slope)
        fill(self, _past=AffineTime(flat, slope))

    @classmethod
    def fitted(cls, profiles: Sequence[Profile]) -> Self:
        """Return LB-BSP's curve of GPUs, flat and then a line, for every worker.

        Right with two sizes or more on either side of the knee. With one, the knee may stand
        anywhere between it and the next.

        Args:
            profiles: what was measured on each worker.

        Raises:
            ValueError: a profile has fewer than three different sizes.
        """
        points = points_of(profiles, least=3, where="PiecewiseTime.fitted(profiles=...)")
        flat_s, saturation, slope_s = zip(*map(_fit_pieces, points), strict=True)
        return cls(np.array(flat_s), np.array(saturation), np.array(slope_s))

    @property
    def world_size(self) -> int:
        return len(self.flat_s)

    def seconds(self, batch_size: IntArray) -> FloatArray:
        past = np.maximum(batch_size - self.saturation, 0)
        times: FloatArray = (self.flat_s + self.slope_s * past) * (batch_size > 0)
        return times

    def largest_batch(self, budget_s: float, most: IntArray) -> IntArray:
        # Past saturation this is an affine model of the samples past it, bit for bit.
        past = self._past.largest_batch(budget_s, np.maximum(most - self.saturation, 0))
        return np.where(self.flat_s <= budget_s, np.minimum(self.saturation + past, most), 0)


def _fit_pieces(points: Profile) -> tuple[float, int, float]:
    """Return the flat seconds, the saturation and the slope of one worker's curve.

    The knee errs least of 256 between 0 and the last size but one, sought once more between its
    neighbours. A line that starts at 0 wins ties.
    """
    last = int(points.sizes[-2])
    spread = np.geomspace(1, last, NUM_CANDIDATES).round().astype(np.int64)
    knees = np.unique(np.concatenate([[0], spread, points.sizes[:-1]]))
    *_, loss = _past(knees, points)
    best = first_best(loss)
    low, high = knees[max(best - 1, 0)], knees[min(best + 1, len(knees) - 1)]
    between = np.linspace(low, high, NUM_CANDIDATES).round().astype(np.int64)
    knees = np.unique(np.concatenate([between, knees[best : best + 1]]))
    intercept, slope, loss = _past(knees, points)
    best = first_best(loss)
    return float(intercept[best]), int(knees[best]), float(slope[best])


def _past(knees: IntArray, points: Profile) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the best lines through the samples past each knee."""
    past = np.maximum(points.sizes - knees[:, None], 0).astype(np.float64)
    return lines_through(past, points.seconds)


@final
@dataclass(frozen=True, slots=True, eq=False)
class AffineTime(AbstractTimeModel):
    r"""Step times that grow in a straight line with the batch.

    $t_r(b) = a_r + c_r b$ for $b \ge 1$, and $t_r(0) = 0$. A worker without samples has no fixed
    cost either, so an expensive worker can be left out if its smallest batch is 0.

    Right for a CPU, and for a GPU past saturation. Wrong below saturation, where a GPU takes
    about the same time for any batch (``PiecewiseTime``), and where kernels come in tiles.

    Args:
        intercept_s: fixed cost $a$ of a step in seconds, finite and at least 0,
            ``(world_size,)``.
        slope_s: cost $c$ of one sample in seconds, finite and at least 0, ``(world_size,)``.
            At 0 every batch takes as long as one sample.

    Raises:
        ValueError: an argument has no or another shape, is negative or is not finite.

    References:
        arXiv 1806.02508 (LB-BSP), the linear part of its GPU curve.
    """

    intercept_s: FloatArray
    slope_s: FloatArray
    _divisor: FloatArray = field(init=False, repr=False)
    _flat: NDArray[np.bool_] | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        intercept = costs("AffineTime(intercept_s=...)", self.intercept_s)
        slope = costs("AffineTime(slope_s=...)", self.slope_s)
        alike("AffineTime(slope_s=...)", slope, other="intercept_s", like=intercept)
        flat = slope == 0
        fill(self, intercept_s=intercept, slope_s=slope)
        # What `largest_batch` divides by, worked out once because the solver calls it many times.
        fill(self, _divisor=np.where(flat, 1.0, slope), _flat=flat if flat.any() else None)

    @property
    def world_size(self) -> int:
        return len(self.slope_s)

    def seconds(self, batch_size: IntArray) -> FloatArray:
        line: FloatArray = (self.intercept_s + self.slope_s * batch_size) * (batch_size > 0)
        return line

    def largest_batch(self, budget_s: float, most: IntArray) -> IntArray:
        with np.errstate(over="ignore"):
            exact = (budget_s - self.intercept_s) / self._divisor
        if self._flat is not None:
            exact = np.where(self._flat & (self.intercept_s <= budget_s), most, exact)
        # The nudge: a budget that is the time of b samples shall give b, not b - 1.
        batch: IntArray = np.minimum(np.maximum(exact * (1 + 2**-51), 0), most).astype(np.int64)

        for _ in range(2):
            more = (batch < most) & (self.seconds(batch + 1) <= budget_s)
            less = (batch > 0) & (self.seconds(batch) > budget_s)
            if not (more | less).any():
                return batch
            batch = batch + more - less
        # A slope below the resolution of its intercept: whole runs of sizes take equal times.
        return bisect_batch(self.seconds, budget_s, most=most)


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
        rule = "give a finite, positive time somewhere on 1..most"
        remedy = "Give p3, p2, p1, p0 in this order, in seconds."
        valid = np.isfinite(last_s) & (last_s > 0)
        check_ranks("CubicTime(coefficients=...)", last_s, valid, rule, remedy)
        slope = np.maximum(last_s - table[ranks, most - 1], last_s / most)
        fill(self, coefficients=coefficients, most=most, _table=table, _slope_past=slope)

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
    name, answer = "CubicTime(coefficients=...)", own(value, np.float64)
    if answer.ndim != 2 or answer.shape[1] != 4 or not len(answer):
        remedy = "Give p3, p2, p1 and p0 of every worker; 0 for what a shorter fit lacks."
        raise invalid(name, "have shape (world_size, 4)", answer.shape, remedy)
    finite = np.isfinite(answer).all(axis=1)
    check_ranks(name, answer, finite, "be finite", "Leave out what was not measured.")
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


def _fit(points: Profile) -> tuple[float, float, float, float]:
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
