"""One step of uneven plans, in every combination that people train with, against one process."""

import pytest

from evenstep.testing import run_workers

from .matrix import CASES, WORLD_SIZE, all_errors

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def errors():
    """Relative errors by case, on rank 0: ours, and those of plain training at the equal split."""
    return run_workers(WORLD_SIZE, all_errors)[0]


@pytest.mark.parametrize("case", [case for case in CASES if not case.amp], ids=str)
def test_in_double_precision_the_gradient_is_that_of_one_process(errors, case):
    """1e-12, the norm that clipping found included."""
    ours, _ = errors[str(case)]

    assert ours <= 1e-12


@pytest.mark.parametrize("case", [case for case in CASES if case.amp], ids=str)
def test_mixed_precision_is_no_worse_than_at_the_equal_split(errors, case):
    """Within 1.2 times the error that plain AMP training has there against double precision."""
    ours, equal = errors[str(case)]

    assert 1e-4 < equal < 0.1
    assert ours <= 1.2 * equal
