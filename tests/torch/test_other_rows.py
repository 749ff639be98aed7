"""Rows of no batch are warned of, with both remedies; a batch in another form is not."""

import pytest

from evenstep.testing import run_workers

from .other_rows import ITS_OWN, STRANGE, error_with_weighted_losses, warnings_of_rows

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def said():
    """How often each loop is warned of, on both ranks."""
    return run_workers(2, warnings_of_rows)


@pytest.mark.parametrize("loop", STRANGE)
def test_rows_of_no_batch_are_warned_of_once(said, loop):
    """They get the weight of the batch in use, which is wrong for rows with a loss of their own."""
    assert [counts[loop] for counts in said] == [1, 1]


@pytest.mark.parametrize("loop", [*ITS_OWN, "equal"])
def test_what_is_the_batch_is_not_warned_of(said, loop):
    """As its number of rows tells; and where sizes are equal, the weight is 1."""
    assert [counts[loop] for counts in said] == [0, 0]


def test_the_batchs_own_loss_weighted_by_hand_is_exact_beside_rows_of_a_memory():
    """1e-12 against one process: the remedy that the warning names."""
    assert max(run_workers(2, error_with_weighted_losses)) <= 1e-12
