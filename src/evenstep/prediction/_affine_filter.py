"""A fixed cost and a cost per sample for every worker, estimated step by step.

Lines go through noisy points that wander. A reading far off a line is believed at once, or held
back for a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from .._types import FloatArray, IntArray, check_fields
from ..exceptions import invalid
from ..timemodels._curves import AffineTime

Mask = NDArray[np.bool_]

LASTING_S = 0.1
"""Seconds for which a worker has to be off before that counts as more than a pause."""


def no_jumps_yet(world_size: int) -> dict[str, Any]:
    """Return the memory before the first step.

    The counts are a prior worth two and a half jumps, four of five of them passing: the first
    jump of a run is held back, and one that proved lasting is enough to trust the next.
    """
    return {
        "open": np.zeros(world_size, np.int64),
        "held_s": np.zeros(world_size),
        "lasting": 0.5,
        "passing": 2.0,
    }


def judge(
    jump: IntArray, seconds: FloatArray, *, ran: Mask, young: Mask, memory: dict[str, Any]
) -> tuple[Mask, Mask, dict[str, Any]]:
    """Return readings to leave out, jumps to follow at once, and what the next step has to know.

    A jump is held back, unless the step before jumped the same way and the two took ``LASTING_S``
    together (then it is lasting) or jumps have mostly proved lasting in this run. Steps of a
    millisecond have pauses of tens, for whatever else the machine does, and several in a row.
    One that was believed at once counts as passing if the next step jumps back. A worker's first
    readings are always followed: which of two is the odd one cannot be known.

    The threshold is low, 30 %, because errors cost different amounts: ignoring a worker that turned
    twice as slow doubles the step, while believing a single slow step costs the others their
    part of a few samples.

    Args:
        jump: -1 for a reading far too fast, 1 for one far too slow, else 0, ``(world_size,)``.
        seconds: what the steps of the reading took, ``(world_size,)``.
        ran: which workers were measured, ``(world_size,)``.
        young: which have too little behind them to be judged, ``(world_size,)``.
        memory: from the step before; left as it is.
    """
    # "open": jumps not settled yet. +-1 was held back, +-2 was believed at once.
    before: IntArray = memory["open"]
    # Forgotten at 2 % a step towards the prior: machines change their ways.
    lasting = 0.98 * memory["lasting"] + 0.02 * 0.5
    passing = 0.98 * memory["passing"] + 0.02 * 2.0
    if not (jump.any() or before.any()):
        none = np.zeros(len(ran), np.bool_)
        return none, none, {**memory, "lasting": lasting, "passing": passing}

    was_held, was_believed = ran & (abs(before) == 1), ran & (abs(before) == 2)
    still = was_held & (jump == np.sign(before))
    held_s = np.where(still, memory["held_s"], 0.0) + seconds
    again = still & (held_s >= LASTING_S)
    undone = was_believed & (jump == -np.sign(before))

    chance = memory["lasting"] / (memory["lasting"] + memory["passing"])
    jumped = ran & (jump != 0)
    hold = jumped & ~(again | undone | young) if chance <= 0.3 else np.zeros_like(jumped)
    accept = jumped & ~hold
    unproven = accept & ~(again | undone | young)

    lasting += int(again.sum() + (was_believed & ~undone).sum())
    passing += int(undone.sum() + (was_held & ~still).sum())
    after = {
        "open": np.where(ran, np.where(hold, jump, np.where(unproven, 2 * jump, 0)), before),
        "held_s": np.where(ran, np.where(hold, held_s, 0.0), memory["held_s"]),
        "lasting": lasting,
        "passing": passing,
    }
    return hold, accept, after


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

    The Kalman gain where ``contrast`` says that the batch has just changed enough to separate the
    fixed cost from the cost per sample. Elsewhere the whole line is scaled: a worker that is
    slower is slower in all that it does, as far as a single size can show. As a balancer keeps
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


@final
@dataclass(frozen=True, slots=True)
class AffineFilter:
    r"""Follows every worker's $t_r(b) = a_r + c_r b$ through noise, drift, hiccups and changes.

    Per worker a small bank of Kalman filters with the state $(a, c)$, a noise $\sigma t$ that is
    learnt, and slopes that wander by $d\,c$ per step, one filter for each $d$ in ``drifts``. The
    estimate is their mean, weighted by the likelihood of the recent steps: on a steady machine
    it averages over a hundred steps, on a restless one it follows the last few.

    One size visited leaves $a$ and $c$ undetermined, and $a = 0$ is assumed; the second size
    settles it. Later, $a$ is corrected only by steps whose size differs from the one before by
    more than ``contrast``.

    A reading off by more than ``gate`` standard deviations and by more than ``least_jump`` is a
    jump. The first is held back: a pause for garbage collection or a checkpoint leaves no trace.
    A second one in the same direction is a lasting change, and followed at once. Where jumps have
    proved lasting in this run, the next is followed without waiting (see ``judge``). A jump back
    to what the worker was before the last one restores what was known of it then.

    Right for any device past saturation, and locally for any smooth curve. Wrong by some percent
    across the steps of a staircase curve, and on a load that flips at every step: nothing that
    only looks back can foresee that. The defaults were chosen on simulated workers; no
    figure is very sensitive.

    Args:
        drifts: relative standard deviations of the slope per step, one filter each, finite and
            positive.
        first_noise: relative noise assumed before any was seen, finite and positive.
        doubt: standard deviation of the intercept before the second size, as a share of the
            first time, finite and positive.
        contrast: relative change of size that informs the intercept, at least 0.
        gate: standard deviations that make a jump, positive.
        least_jump: relative change that makes a jump, positive.
        memory: weight of the past in the likelihood, per step, in [0, 1).

    Raises:
        ValueError: an argument is out of range.

    References:
        R. E. Kalman, 1960; the bank of models: D. T. Magill, 1965. Nothing here is from the
        papers that ``evenstep.policies`` follows.
    """

    drifts: tuple[float, ...] = (0.002, 0.015, 0.06)
    first_noise: float = 0.03
    doubt: float = 1.0
    contrast: float = 0.05
    gate: float = 4.0
    least_jump: float = 0.15
    memory: float = 0.99

    def __post_init__(self) -> None:
        if not self.drifts or not all(0 < drift < math.inf for drift in self.drifts):
            remedy = "Give (0.01,) for a single filter."
            rule = "hold at least one number, all finite and positive"
            raise invalid("AffineFilter(drifts=...)", rule, self.drifts, remedy)
        check_fields(
            self,
            first_noise=("finite and positive", "0.03 is 3 %."),
            doubt=("finite and positive", "1 is as much as the first time."),
            contrast=("at least 0", "0.05 is a change of 5 %."),
            gate=("positive", "Raise it."),
            least_jump=("positive", "Raise it."),
            memory=("in [0, 1)", "0.99 remembers about a hundred steps."),
        )

    def init(self, world_size: int) -> dict[str, Any]:
        """Return the state before the first step."""
        nothing = Lines(np.zeros((len(NAMES), len(self.drifts), world_size)))
        nothing.noise[:] = self.first_noise
        return {
            "num_steps": np.zeros(world_size, np.int64),
            "batch_size": np.zeros(world_size, np.int64),
            "lines": nothing.values,
            "former": nothing.values,
            "jumps": no_jumps_yet(world_size),
        }

    def update(
        self,
        state: dict[str, Any],
        batch_size: IntArray,
        compute_s: FloatArray,
        *,
        num_steps: int = 1,
    ) -> dict[str, Any]:
        """Return the state after one more step, leaving ``state`` as it is.

        Args:
            state: from ``init`` or ``update``.
            batch_size: samples each worker computed, ``(world_size,)``. A worker with 0 keeps
                its estimate.
            compute_s: seconds each needed for them, positive and finite, ``(world_size,)``.
                Ignored where no samples were computed.
            num_steps: of how many steps in a row these are the typical times, at least 1.
        """
        ran, steps = batch_size > 0, state["num_steps"]
        batch = np.maximum(batch_size, 1).astype(np.float64)
        seconds = np.where(ran, compute_s, 1.0)
        old, kept = Lines(state["lines"]), state["former"]
        lines, unmeasured = wander(old, batch, np.array(self.drifts)[:, np.newaxis]), steps == 0
        if unmeasured.any():
            # Also for those still to be measured: any line will do, as long as it is one.
            lines = through(batch, seconds, doubt=self.doubt, lines=old).where(unmeasured, lines)

        reading = read(lines, batch, seconds)
        again = ran & ~unmeasured
        jump = again * self._jumps(lines.weights(), reading)
        took_s, young = num_steps * seconds, steps < 2
        hold, accept, jumps = judge(jump, took_s, ran=ran, young=young, memory=state["jumps"])

        rate = np.maximum(1 / (steps + 1), 0.03)
        fitted = grade(lines, reading, rate=rate, memory=self.memory)
        noise = fitted.noise  # from jumps, too: one after the other is noise
        before = np.maximum(state["batch_size"], 1)
        contrast = abs(batch - before) > self.contrast * np.maximum(batch, before)
        if accept.any():
            former = Lines(kept)
            opened = loosen(lines, reading, where=accept)
            back = self._explains(former, batch, seconds) & accept
            opened = former.where(back, opened)
            kept = old.where(accept, former).values
            # Not graded: a jump says nothing about which model is the best between jumps.
            fitted = opened.where(accept, fitted)
            reading = read(opened, batch, seconds)
        fitted = correct(fitted, reading, contrast=contrast & ~accept)

        follow = again & ~hold
        # A first reading is a line of its own, and one held back leaves no trace.
        if not follow.all():
            fitted = fitted.where(follow, lines.where(ran & unmeasured, old))
        return {
            "num_steps": steps + ran,
            "batch_size": np.where(ran, batch_size, state["batch_size"]),
            "lines": fitted.with_noise(noise, where=jump != 0).values,
            "former": kept,
            "jumps": jumps,
        }

    def after(self, sizes: IntArray, seconds: FloatArray) -> dict[str, Any]:
        """Return the state after recorded steps, both ``(num_steps, world_size)``."""
        state = self.init(sizes.shape[1])
        for batch_size, compute_s in zip(sizes, seconds, strict=True):
            state = self.update(state, batch_size, compute_s)
        return state

    def times(self, state: dict[str, Any]) -> AffineTime | None:
        """Return the estimate, or None until every worker was measured once."""
        if (state["num_steps"] == 0).any():
            return None
        lines = Lines(state["lines"])
        intercept_s, slope_s = (lines.weights() * lines.values[:2]).sum(axis=1)
        return AffineTime(intercept_s, slope_s)

    def uncertainty(self, state: dict[str, Any]) -> FloatArray:
        """Return the relative standard error of each time at the size it last had.

        What is left of the noise after averaging, 1 for a worker never measured,
        ``(world_size,)``.
        """
        lines = Lines(state["lines"])
        batch = np.maximum(state["batch_size"], 1).astype(np.float64)
        return _relative_error(state, lines.at(batch), lines.variance(batch))

    def slope_uncertainty(self, state: dict[str, Any]) -> FloatArray:
        """Return the relative standard error of each cost per sample, ``(world_size,)``.

        Large where the sizes so far lie close together, however well their times are known: what
        is missing in one part of the line is then in the other. 1 for a worker never measured.
        """
        lines = Lines(state["lines"])
        return _relative_error(state, lines.slope_s, np.maximum(lines.var_slope, 0.0))

    def holds_back(self, state: dict[str, Any]) -> Mask:
        """Return whose last reading was taken for a passing one so far, ``(world_size,)``."""
        held: Mask = abs(state["jumps"]["open"]) == 1
        return held

    def noise(self, state: dict[str, Any]) -> FloatArray:
        """Return the relative standard deviation of a single step, learnt, ``(world_size,)``."""
        lines = Lines(state["lines"])
        noise: FloatArray = (lines.weights() * lines.noise).sum(axis=0)
        return noise

    def _explains(self, former: Lines, batch: FloatArray, seconds: FloatArray) -> Mask:
        """Return which readings are what the lines before the last jump would have foreseen."""
        reading = read(former, batch, seconds)
        known = reading.expected.min(axis=0) > 0  # there was a jump before
        explained: Mask = known & (self._jumps(former.weights(), reading) == 0)
        return explained

    def _jumps(self, weights: FloatArray, reading: Residuals) -> IntArray:
        """Return -1, 0 or 1 for readings far below, near or far above what was expected."""
        # Workers never measured have no mean.
        mean = np.maximum((weights * reading.expected).sum(axis=0), 1e-300)
        ratio, least = reading.seconds / mean, 1 + self.least_jump
        far = (ratio > least) | (ratio * least < 1)
        if not far.any():  # nearly always, and the rest takes as long again
            return np.zeros(len(far), np.int64)
        variance = _variance(weights, reading.expected, mean, reading.total)
        surprise = reading.seconds - mean
        off = abs(surprise) > self.gate * np.sqrt(variance)
        return np.where(off & far, np.sign(surprise), 0).astype(np.int64)


def _relative_error(state: dict[str, Any], values: FloatArray, each: FloatArray) -> FloatArray:
    """Return the standard error of each worker's mean value; 1 for one never measured."""
    measured, weights = state["num_steps"] > 0, Lines(state["lines"]).weights()
    mean = (weights * values).sum(axis=0)
    error = np.ones(len(measured))
    deviation = np.sqrt(_variance(weights, values, mean, each))
    np.divide(deviation, mean, out=error, where=measured)
    return error


def _variance(
    weights: FloatArray, times: FloatArray, mean: FloatArray, each: FloatArray
) -> FloatArray:
    """Return the variance of a bank of models' times around their mean, ``(world_size,)``."""
    variance: FloatArray = (weights * (each + (times - mean) ** 2)).sum(axis=0)
    return variance
