"""One step of uneven plans, in every combination that people train with, against one process."""

from dataclasses import astuple
from itertools import combinations

import pytest

from evenstep.testing import run_workers

from .matrix import CASES, EVERY, WORLD_SIZE, all_errors


@pytest.fixture(scope="module")
def errors():
    """Relative errors by case, on rank 0: ours, and those of plain AMP at the equal split."""
    return run_workers(WORLD_SIZE, all_errors, timeout_s=170)[0]  # 30 s on two idle cores


@pytest.mark.cluster
@pytest.mark.parametrize("case", [case for case in CASES if not case.amp], ids=str)
def test_in_double_precision_the_gradient_is_that_of_one_process(errors, case):
    """1e-12, the norm that clipping found included."""
    assert errors[str(case)].ours <= 1e-12


@pytest.mark.cluster
@pytest.mark.parametrize("case", [case for case in CASES if case.amp], ids=str)
def test_mixed_precision_is_no_worse_than_at_the_equal_split(errors, case):
    """Within 1.2 times the error that plain AMP training has there against double precision."""
    ours, equal = errors[str(case)]

    assert 1e-4 < equal < 0.1
    assert ours <= 1.2 * equal


def test_every_value_of_one_axis_meets_every_value_of_every_other():
    """The cases here stand for the 96 cells, which `benchmarks/matrix.py` runs."""
    assert len(set(EVERY)) == 96
    assert len({str(case) for case in CASES}) == len(CASES)
    assert pairs_of(EVERY) <= pairs_of(CASES)


def pairs_of(cases):
    """All pairs of values that occur together, with the axes that they are of."""
    return {pair for case in cases for pair in combinations(enumerate(astuple(case)), 2)}
