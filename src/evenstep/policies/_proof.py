"""Whether unequal sizes cost more than they save, by what steps took."""

from __future__ import annotations

import math

import numpy as np

from .._types import FloatArray, IntArray, StepTimings
from ..timemodels._affine import AffineTime

_LEAST, _MEMORY = 8, 32  # readings at unequal sizes: to judge by, and to average over
_SURE = 2.5  # standard errors
_REST, _LONGEST_REST = 16, 128  # readings at the equal split, until others are tried anew
_PROVED = 64  # readings in a row at unequal sizes: the next rest is short again
_IN_A_ROW = 8  # times that one worker is the slowest: that is no chance

# Mean and variance of the ratio, of how many readings; how long to rest, now and the next time;
# the slowest worker, and how often in a row it was.
_FRESH = (0.0, 0.0, 0.0, 0.0, float(_REST), -1.0, 0.0)


def no_proof() -> FloatArray:
    """Return the state before the first reading."""
    return np.array(_FRESH)


def rests(proof: FloatArray) -> bool:
    """Tell whether sizes have to be equal for a while, as others cost more than they saved."""
    return bool(proof[3] > 0)


def proved(
    proof: FloatArray, timings: StepTimings, times: AffineTime, equal: IntArray
) -> FloatArray:
    r"""Return the state after one more reading.

    At unequal sizes it took $m / e$ of what the equal split would have taken, with
    $m = \max_r \tau_r$ as measured and $e = \max_r \tau_r \, t_r(b'_r) / t_r(b_r)$ by the fit:
    whatever befell a worker would have befallen it at any size. One without samples was not
    measured, and would have taken $t_r(b'_r)$. Where the mean of the newest readings, at least 8,
    exceeds 1 by 2.5 standard errors, times differ by chance, and following them costs time. Then
    the equal split rests: for 16 readings, and for twice as long each further time, up to 128. It
    rests no longer once one worker was the slowest 8 times in a row.

    Args:
        proof: from ``no_proof`` or ``proved``; left as it is.
        timings: the reading.
        times: what workers take, by the fit.
        equal: the equal split.
    """
    mean, variance, num, rest, next_rest, slowest, in_a_row = proof.tolist()
    ran = timings.batch_size > 0
    took_s = np.where(ran, timings.compute_s, 0.0)
    if np.array_equal(timings.batch_size, equal):
        last = float(took_s.argmax())
        in_a_row = in_a_row + 1 if last == slowest else 1.0
        rest = 0.0 if in_a_row >= _IN_A_ROW else max(rest - 1, 0.0)
        return np.array([0.0, 0.0, 0.0, rest, next_rest, last, in_a_row])
    size, foreseen_s = np.maximum(timings.batch_size, 1), times.seconds(equal)
    equal_s = np.where(ran, took_s * foreseen_s / times.seconds(size), foreseen_s)
    ratio = float(took_s.max() / equal_s.max())
    num += 1
    rate = 1 / min(num, _MEMORY)
    off = ratio - mean
    mean, variance = mean + rate * off, (1 - rate) * (variance + rate * off**2)
    if not rest and num >= _LEAST and mean > 1 + _SURE * math.sqrt(variance * rate):
        longer = min(2 * next_rest, _LONGEST_REST)
        return np.array([0.0, 0.0, 0.0, next_rest, longer, -1.0, 0.0])
    if num >= _PROVED:
        next_rest = float(_REST)
    return np.array([mean, variance, num, rest, next_rest, -1.0, 0.0])
