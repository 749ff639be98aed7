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
_WORSE, _MUCH_WORSE = 2.0, 3.0  # times what the equal split took: in as many readings as above,
_FEW = 3  # and in so many
_GROWN = 1.1  # times what the equal split takes: as long as others took, so load has grown
_LONGEST_PROVED_REST = 1024

# Mean and variance of the ratio, of how many readings; how long to rest, now and the next time;
# the slowest worker, and how often in a row it was. Then what steps took: in how many at the equal
# split, and at others since; the means of both; whether the rest is for these.
_FRESH = (0.0, 0.0, 0.0, 0.0, float(_REST), -1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


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

    No fit tells of times that jump at some size, as where memory is swapped. So $m$ is compared
    with what equal steps took before, too, where a worker with more than its equal share is the
    slowest. Where it is three times as much in the mean of 3 readings, or twice in that of 8, the
    equal split rests likewise, up to 1,024 readings: until 3 of them show that it takes as long by
    now.

    Args:
        proof: from ``no_proof`` or ``proved``; left as it is.
        timings: the reading.
        times: what workers take, by the fit.
        equal: the equal split.
    """
    mean, variance, num, rest, next_rest, slowest, in_a_row, *took = proof.tolist()
    ran = timings.batch_size > 0
    took_s = np.where(ran, timings.compute_s, 0.0)
    last = int(took_s.argmax())
    if np.array_equal(timings.batch_size, equal):
        in_a_row = in_a_row + 1 if last == slowest else 1.0
        took = _at_equal(took, float(took_s[last]))
        is_over = _has_grown(took) if took[4] else in_a_row >= _IN_A_ROW
        rest = 0.0 if is_over else max(rest - 1, 0.0)
        if not rest:
            took = [took[0], 0.0, took[2], 0.0, 0.0]
        return np.array([0.0, 0.0, 0.0, rest, next_rest, last, in_a_row, *took])
    if not rest:
        has_more = bool(timings.batch_size[last] > equal[last])
        took = _at_others(took, float(took_s[last]), has_more=has_more)
        if _is_worse(took):
            longer = min(2 * next_rest, _LONGEST_PROVED_REST)
            took = [0.0, took[1], 0.0, took[3], 1.0]
            return np.array([0.0, 0.0, 0.0, next_rest, longer, -1.0, 0.0, *took])
    size, foreseen_s = np.maximum(timings.batch_size, 1), times.seconds(equal)
    equal_s = np.where(ran, took_s * foreseen_s / times.seconds(size), foreseen_s)
    ratio = float(took_s.max() / equal_s.max())
    num += 1
    rate = 1 / min(num, _MEMORY)
    off = ratio - mean
    mean, variance = mean + rate * off, (1 - rate) * (variance + rate * off**2)
    if not rest and num >= _LEAST and mean > 1 + _SURE * math.sqrt(variance * rate):
        longer = max(min(2 * next_rest, _LONGEST_REST), next_rest)
        return np.array([0.0, 0.0, 0.0, next_rest, longer, -1.0, 0.0, *took])
    if num >= _PROVED:
        next_rest = float(_REST)
    return np.array([mean, variance, num, rest, next_rest, -1.0, 0.0, *took])


def _at_equal(took: list[float], step_s: float) -> list[float]:
    """Return what steps took with one more at the equal split."""
    num_equal, num_others, equal_s, others_s, is_proved = took
    if num_others and not is_proved:  # the first one after others
        num_equal = num_others = 0.0
    num_equal += 1
    equal_s += (step_s - equal_s) / min(num_equal, _MEMORY)
    return [num_equal, num_others, equal_s, others_s, is_proved]


def _at_others(took: list[float], step_s: float, *, has_more: bool) -> list[float]:
    """Return what steps took with one more at other sizes; not one that others' load made slow."""
    num_equal, num_others, equal_s, others_s, is_proved = took
    if not has_more:
        return [num_equal, max(num_others - 1, 0.0), equal_s, others_s, is_proved]
    num_others += 1
    others_s += (step_s - others_s) / min(num_others, _MEMORY)
    return [num_equal, num_others, equal_s, others_s, is_proved]


def _is_worse(took: list[float]) -> bool:
    """Tell whether steps at other sizes took much longer than equal ones."""
    num_equal, num_others, equal_s, others_s, _ = took
    is_sure = num_others >= _LEAST and others_s > _WORSE * equal_s
    return bool(num_equal) and (
        is_sure or (num_others >= _FEW and others_s > _MUCH_WORSE * equal_s)
    )


def _has_grown(took: list[float]) -> bool:
    """Tell whether the equal split takes as long by now as others took, so that load has grown."""
    num_equal, _, equal_s, others_s, _ = took
    return num_equal >= _FEW and equal_s * _GROWN > others_s
