"""A model's output may be changed in place, as without evenstep."""

import pytest

from evenstep.testing import run_workers

from .in_place import CASES, OURS, REFUSED, found_in

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def found():
    """Errors of gradients in fp64, or what was raised, by case, on rank 0 of two."""
    return run_workers(2, found_in)[0]


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_that_of_one_process(found, case):
    """1e-12: `logits /= T`, and `out[mask] = 0`."""
    assert found[case] <= 1e-12


@pytest.mark.parametrize("case", REFUSED)
def test_what_torch_refuses_is_refused(found, case):
    """A layer may have saved its output for the backward, which would read the changed one."""
    ours, theirs = found[case]

    assert "in-place" in theirs or "inplace" in theirs
    assert "in-place" in ours or "inplace" in ours


@pytest.mark.parametrize("case", OURS)
def test_outputs_that_share_memory_are_refused_with_the_remedy(found, case):
    """To change one changes the other, of which its gradient would not know."""
    ours, theirs = found[case]

    assert not theirs
    assert "evenstep" in ours.lower()
    assert "clone" in ours.lower()
