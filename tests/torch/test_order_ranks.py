"""Orders between real ranks: no collective, errors on all of them, nobody waits for a lost one."""

from __future__ import annotations

import pytest

from evenstep.testing import run_workers

from . import order_runs


@pytest.mark.parametrize("kind", ["order", "same", "sharded"])
def test_a_fetch_makes_no_collective_once_the_run_is_open(kind):
    """A prefetching thread may ask for a batch while the main thread is in a collective."""
    for num_steps, counts in run_workers(2, order_runs.collectives_in_next, kind, timeout_s=120):
        assert num_steps >= 10
        assert counts == {0}


def test_a_sampler_that_fails_late_ends_the_loop_on_all_ranks():
    """Rank 0 with its error, the others with its words, at the same step."""
    (mine, error), (other, words) = run_workers(2, order_runs.break_late, timeout_s=120)

    assert mine == other > 50  # where a later block is drawn
    assert error == "ConnectionError: the table of the samples is gone"
    assert words == f"RuntimeError: the sampler failed on rank 0: {error}"


def test_nobody_waits_for_the_order_of_a_rank_that_has_left():
    """It raises, and names who is gone."""
    results = run_workers(2, order_runs.leave_before_the_order, timeout_s=60)

    assert results[0] == "left"
    assert "Rank 0 on " in results[1]
    assert "it ended its run" in results[1]
