"""A state that goes from batch to batch: exact where sizes stay, refused where they change."""

from __future__ import annotations

import pytest
import torch

from evenstep.policies import Fixed
from evenstep.testing import WorkerFailed, run_workers

from .carried import after_the_end, alone, balanced
from .plans import Restless

pytestmark = pytest.mark.cluster


def test_a_carried_state_is_exact_where_sizes_stay():
    """A rank has the same columns in each batch, however unlike the sizes."""
    expected = alone()
    for found in run_workers(2, balanced, Fixed((6, 2))):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cell", [False, True], ids=["LSTM", "LSTMCell"])
def test_a_carried_state_is_refused_where_sizes_change(cell):
    """The error says whose rows the state has, and how to keep the sizes."""
    name = "LSTMCell" if cell else "LSTM"
    rule = rf"`{name}.forward\(hx=\.\.\.\)` must have as many rows as its input, \d+, got \d+\. "
    with pytest.raises(WorkerFailed, match=rule + r"A state that is carried .*policy=Fixed"):
        run_workers(2, restless, cell)


def restless(rank, cell):
    return balanced(rank, Restless(), cell=cell)


def test_a_new_state_for_each_batch_goes_with_any_sizes():
    """Recurrent models as such are balanced like others."""
    plain, moved = (run_workers(2, fresh, policy)[0] for policy in (Fixed((4, 4)), Restless()))

    torch.testing.assert_close(moved, plain, rtol=0, atol=1e-12)


def fresh(rank, policy):
    return balanced(rank, policy, carry=False)


def test_the_watch_on_states_ends_with_the_balancer():
    """A model that goes on without it has its layers as they were."""
    assert run_workers(2, after_the_end) == [(1, 0), (1, 0)]
