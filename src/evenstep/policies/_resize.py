"""What a change of sizes costs, learnt from the first step after each."""

from __future__ import annotations

from .._types import StepTimings
from ..timemodels import AffineTime

_WEIGHT = 0.3  # of the newest change
_USUAL = 1.1  # times what was expected: no more than noise


def resize_cost_s(before_s: float, timings: StepTimings, expected: AffineTime) -> float:
    r"""Return the seconds that a change costs, after one more first step at new sizes.

    $c \leftarrow 0.7\, c + 0.3\, (T - \hat T)$, where the step took a tenth longer than expected,
    else towards 0: kernels tuned per shape, an allocator that grows, a graph compiled anew.

    Args:
        before_s: the estimate so far, at least 0.
        timings: the first step after a change.
        expected: what the workers were expected to take.
    """
    ran = timings.batch_size > 0
    taken_s = float(timings.compute_s[ran].max())
    expected_s = float(expected.seconds(timings.batch_size)[ran].max())
    excess_s = taken_s - expected_s if taken_s > _USUAL * expected_s else 0.0
    return before_s + _WEIGHT * (excess_s - before_s)
