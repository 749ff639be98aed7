"""One step of uneven plans, in every combination that people train with, against one process."""

from dataclasses import astuple
from itertools import combinations

import pytest

from evenstep.testing import run_workers

from .._tiers import Groups, slow_but
from .matrix import CASES, EVERY, WORLD_SIZE, all_errors

# In `make test`, uncompiled: each wrapper in double precision, and DDP in bf16.
FIRST = [
    next(case for case in CASES if (case.wrap, case.amp, case.compiled) == (wrap, amp, False))
    for wrap, amp in (("ddp", False), ("fsdp2", False), ("ddp", True))
]


@pytest.fixture(scope="module")
def errors():
    """Relative errors by case, on rank 0: ours, and those of plain AMP at the equal split."""

    def run(cases):  # all of them take 30 s on two idle cores
        return run_workers(WORLD_SIZE, all_errors, cases, timeout_s=170)[0]

    return Groups(FIRST, CASES, run)


@pytest.mark.cluster
@pytest.mark.parametrize("case", slow_but(FIRST, [c for c in CASES if not c.amp]), ids=str)
def test_in_double_precision_the_gradient_is_that_of_one_process(errors, case):
    """1e-12, the norm that clipping found included."""
    assert errors[case].ours <= 1e-12


@pytest.mark.cluster
@pytest.mark.parametrize("case", slow_but(FIRST, [c for c in CASES if c.amp]), ids=str)
def test_mixed_precision_is_no_worse_than_at_the_equal_split(errors, case):
    """Within 1.2 times the error that plain AMP training has there against double precision."""
    ours, equal = errors[case]

    assert 1e-4 < equal < 0.1
    assert ours <= 1.2 * equal


def test_every_value_of_one_axis_meets_every_value_of_every_other():
    """The cases here stand for all 96 cells."""
    assert len(set(EVERY)) == 96
    assert len({str(case) for case in CASES}) == len(CASES)
    assert pairs_of(EVERY) <= pairs_of(CASES)


def pairs_of(cases):
    """All pairs of values that occur together, with the axes that they are of."""
    return {pair for case in cases for pair in combinations(enumerate(astuple(case)), 2)}
