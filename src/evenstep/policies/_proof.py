"""Whether unequal sizes cost more than they save, by what steps took."""

from __future__ import annotations

import math
from typing import NamedTuple

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


class _Proof(NamedTuple):
    """The state: an array of these numbers, as all state of a policy.

    Attributes:
        ratio, variance, num_ratios: what unequal sizes took over what equal ones would have: mean,
            variance, and of how many readings.
        rest, next_rest: for how many readings sizes stay equal, now and the next time.
        slowest, in_a_row: the slowest worker at the equal split, and how often it was in a row.
        num_equal, equal_s: what steps took at the equal split: in the mean, and of how many.
        num_others, others_s: at other sizes since, likewise.
        is_proved: whether the rest is for what steps took: 1 or 0.
    """

    ratio: float = 0.0
    variance: float = 0.0
    num_ratios: float = 0.0
    rest: float = 0.0
    next_rest: float = float(_REST)
    slowest: float = -1.0
    in_a_row: float = 0.0
    num_equal: float = 0.0
    num_others: float = 0.0
    equal_s: float = 0.0
    others_s: float = 0.0
    is_proved: float = 0.0


def no_proof() -> FloatArray:
    """Return the state before the first reading."""
    return np.array(_Proof())


def why_equal(proof: FloatArray) -> str:
    """Return why sizes have to be equal for a while; nothing where they need not be."""
    state = _Proof(*proof.tolist())
    if not state.rest:
        return ""
    if state.is_proved:
        return "equal: steps at other sizes took at least twice as long as equal ones"
    return "equal: following times that vary by chance cost more than it saved"


def proved(
    proof: FloatArray, timings: StepTimings, times: AffineTime, equal: IntArray
) -> FloatArray:
    r"""Return the state after one more reading.

    At unequal sizes it took $m / e$ of what the equal split would have taken, with
    $m = \max_r \tau_r$ as measured and $e = \max_r \tau_r \, t_r(b'_r) / t_r(b_r)$ by the fit:
    whatever befell a worker would have befallen it at any size. One without samples was not
    measured, and would have taken $t_r(b'_r)$. Where the mean of the newest readings, at least 8,
    exceeds 1 by 2.5 standard errors, times differ by chance, and following them costs time. Then
    sizes stay equal for 16 readings, and for twice as many each further time, up to 128. They may
    differ again as soon as one worker was the slowest 8 times in a row.

    No fit shows times that jump at some size, as where memory is swapped. So $m$ is compared
    with what equal steps took before, too, where a worker with more than its equal share is the
    slowest. Where it is three times as much in the mean of 3 readings, or twice in that of 8, sizes
    stay equal too, for up to 1,024 readings, or until 3 of them show that equal steps take as long
    by now.

    Args:
        proof: from ``no_proof`` or ``proved``; left as it is.
        timings: the reading.
        times: what workers take, by the fit.
        equal: the equal split.
    """
    before = _Proof(*proof.tolist())
    ran = timings.batch_size > 0
    took_s = np.where(ran, timings.compute_s, 0.0)
    if np.array_equal(timings.batch_size, equal):
        return np.array(_at_equal(before, took_s))
    before = before._replace(slowest=-1.0, in_a_row=0.0)
    if not before.rest:
        last = int(took_s.argmax())
        has_more = bool(timings.batch_size[last] > equal[last])
        before = _at_others(before, float(took_s[last]), has_more=has_more)
        if _is_worse(before):
            before = _resting(before, _LONGEST_PROVED_REST)
            return np.array(before._replace(num_equal=0.0, equal_s=0.0, is_proved=1.0))
    size, foreseen_s = np.maximum(timings.batch_size, 1), times.seconds(equal)
    equal_s = np.where(ran, took_s * foreseen_s / times.seconds(size), foreseen_s)
    return np.array(_by_ratio(before, float(took_s.max() / equal_s.max())))


def _at_equal(proof: _Proof, took_s: FloatArray) -> _Proof:
    """Return the state after a step at the equal split."""
    last = int(took_s.argmax())
    proof = proof._replace(
        ratio=0.0,
        variance=0.0,
        num_ratios=0.0,
        slowest=float(last),
        in_a_row=proof.in_a_row + 1 if last == proof.slowest else 1.0,
    )
    if proof.num_others and not proof.is_proved:  # the first one after others
        proof = proof._replace(num_equal=0.0, num_others=0.0)
    num_equal = proof.num_equal + 1
    off_s = float(took_s[last]) - proof.equal_s
    proof = proof._replace(
        num_equal=num_equal, equal_s=proof.equal_s + off_s / min(num_equal, _MEMORY)
    )
    is_over = _has_grown(proof) if proof.is_proved else proof.in_a_row >= _IN_A_ROW
    proof = proof._replace(rest=0.0 if is_over else max(proof.rest - 1, 0.0))
    if not proof.rest:
        proof = proof._replace(num_others=0.0, others_s=0.0, is_proved=0.0)
    return proof


def _at_others(proof: _Proof, step_s: float, *, has_more: bool) -> _Proof:
    """Return the state with a step at other sizes; without one that others' load made slow."""
    if not has_more:
        return proof._replace(num_others=max(proof.num_others - 1, 0.0))
    num_others = proof.num_others + 1
    off_s = step_s - proof.others_s
    return proof._replace(
        num_others=num_others, others_s=proof.others_s + off_s / min(num_others, _MEMORY)
    )


def _by_ratio(proof: _Proof, ratio: float) -> _Proof:
    """Return the state with one ratio more: sizes stay equal where it is above 1 for sure."""
    num = proof.num_ratios + 1
    rate = 1 / min(num, _MEMORY)
    off = ratio - proof.ratio
    mean, variance = proof.ratio + rate * off, (1 - rate) * (proof.variance + rate * off**2)
    if not proof.rest and num >= _LEAST and mean > 1 + _SURE * math.sqrt(variance * rate):
        return _resting(proof, max(_LONGEST_REST, proof.next_rest))
    return proof._replace(
        ratio=mean,
        variance=variance,
        num_ratios=num,
        next_rest=float(_REST) if num >= _PROVED else proof.next_rest,
    )


def _resting(proof: _Proof, longest: float) -> _Proof:
    """Return the state in which sizes stay equal, and for twice as long the next time."""
    return proof._replace(
        ratio=0.0,
        variance=0.0,
        num_ratios=0.0,
        rest=proof.next_rest,
        next_rest=min(2 * proof.next_rest, longest),
    )


def _is_worse(proof: _Proof) -> bool:
    """Return whether steps at other sizes took much longer than equal ones."""
    num, others_s, equal_s = proof.num_others, proof.others_s, proof.equal_s
    is_sure = num >= _LEAST and others_s > _WORSE * equal_s
    return bool(proof.num_equal) and (is_sure or (num >= _FEW and others_s > _MUCH_WORSE * equal_s))


def _has_grown(proof: _Proof) -> bool:
    """Return whether the equal split now takes as long as others took, so that load has grown."""
    return proof.num_equal >= _FEW and proof.equal_s * _GROWN > proof.others_s
