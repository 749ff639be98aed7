"""A fixed cost and a cost per sample for every worker, estimated step by step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from .._types import FloatArray, IntArray
from .._valid import check_fields
from ..exceptions import invalid
from ..timemodels._affine import AffineTime
from ._lines import NAMES, Lines, Residuals, correct, grade, loosen, read, through, wander
from ._trust import Mask, judge, no_jumps_yet


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
        contrast: relative change of size that tells about the intercept, at least 0.
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
        verdict = judge(jump, took_s, ran=ran, young=young, memory=state["jumps"])

        rate = np.maximum(1 / (steps + 1), 0.03)
        fitted = grade(lines, reading, rate=rate, memory=self.memory)
        noise = fitted.noise  # from jumps, too: one after the other is noise
        before = np.maximum(state["batch_size"], 1)
        contrast = abs(batch - before) > self.contrast * np.maximum(batch, before)
        if verdict.accept.any():
            former = Lines(kept)
            opened = loosen(lines, reading, where=verdict.accept)
            back = self._explains(former, batch, seconds) & verdict.accept
            opened = former.where(back, opened)
            kept = old.where(verdict.accept, former).values
            # Not graded: a jump says nothing about which model is the best between jumps.
            fitted = opened.where(verdict.accept, fitted)
            reading = read(opened, batch, seconds)
        fitted = correct(fitted, reading, contrast=contrast & ~verdict.accept)

        follow = again & ~verdict.hold
        # A first reading is a line of its own, and one held back leaves no trace.
        if not follow.all():
            fitted = fitted.where(follow, lines.where(ran & unmeasured, old))
        return {
            "num_steps": steps + ran,
            "batch_size": np.where(ran, batch_size, state["batch_size"]),
            "lines": fitted.with_noise(noise, where=jump != 0).values,
            "former": kept,
            "jumps": verdict.memory,
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
        measured = state["num_steps"] > 0
        lines = Lines(state["lines"])
        batch = np.maximum(state["batch_size"], 1).astype(np.float64)
        weights, times = lines.weights(), lines.at(batch)
        mean = (weights * times).sum(axis=0)
        variance = _variance(weights, times, mean, lines.variance(batch))
        error = np.ones(len(measured))
        np.divide(np.sqrt(variance), mean, out=error, where=measured)
        return error

    def slope_uncertainty(self, state: dict[str, Any]) -> FloatArray:
        """Return the relative standard error of each cost per sample, ``(world_size,)``.

        Large where the sizes so far lie close together, however well their times are known: what
        is missing in one part of the line is then in the other. 1 for a worker never measured.
        """
        measured = state["num_steps"] > 0
        lines = Lines(state["lines"])
        weights = lines.weights()
        mean = (weights * lines.slope_s).sum(axis=0)
        variance = _variance(weights, lines.slope_s, mean, np.maximum(lines.var_slope, 0.0))
        error = np.ones(len(measured))
        np.divide(np.sqrt(variance), mean, out=error, where=measured)
        return error

    def holds_back(self, state: dict[str, Any]) -> Mask:
        """Tell whose last reading was taken for a passing one so far, ``(world_size,)``."""
        held: Mask = abs(state["jumps"]["open"]) == 1
        return held

    def noise(self, state: dict[str, Any]) -> FloatArray:
        """Return the relative standard deviation of a single step, learnt, ``(world_size,)``."""
        lines = Lines(state["lines"])
        noise: FloatArray = (lines.weights() * lines.noise).sum(axis=0)
        return noise

    def _explains(self, former: Lines, batch: FloatArray, seconds: FloatArray) -> Mask:
        """Tell which readings are what the lines before the last jump would have foreseen."""
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


def _variance(
    weights: FloatArray, times: FloatArray, mean: FloatArray, each: FloatArray
) -> FloatArray:
    """Return the variance of a bank of models' times around their mean, ``(world_size,)``."""
    variance: FloatArray = (weights * (each + (times - mean) ** 2)).sum(axis=0)
    return variance
