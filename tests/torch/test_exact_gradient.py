"""The gradient of a step is the one that a single process computes from the global batch."""

import pytest

from evenstep.testing import run_workers

from .exactness import CASES, worst_errors

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def errors():
    """Relative errors in fp64 by case, on rank 0 of 4, under plans that change at every step."""
    return run_workers(4, worst_errors)[0]


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_that_of_one_process(errors, case):
    """1e-12 in fp64, the short last batch with ranks that have no sample included."""
    error, num_plans = errors[case]

    assert error <= 1e-12
    assert num_plans >= 3


def test_with_all_weights_one_it_would_be_another(errors):
    """The control: the same comparison fails by far if uneven batches count alike."""
    error, _ = errors["control"]

    assert error > 0.05
