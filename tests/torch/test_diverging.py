"""A rank that goes another way than the others ends the run on all of them, by name."""

import pytest

from evenstep.testing import run_workers

from .diverging import (
    ODD,
    WAITS,
    WAYS,
    error_of,
    told_by_others,
    waited_for,
    with_unused_parameters,
    zeros_for_a_loss,
)

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_reduce_different_batches_end_at_once(way):
    """Not after a silent run on wrong gradients, nor after a wait for hang_s."""
    results = run_workers(2, error_of, way, timeout_s=60.0)

    for kind, text in results:
        assert kind == "RanksDivergedError", text
        assert f"Rank {ODD} reduced gradients of" in text
        assert "To skip a batch, skip it on all" in text


@pytest.mark.parametrize("way", WAITS)
def test_ranks_that_wait_for_each_other_end_long_before_a_slow_one_would(way):
    """One waits for its next batch, the others in a backward: it is named, and not called slow."""
    for kind, text in run_workers(2, waited_for, way, timeout_s=60.0):
        assert kind == "WorkerLostError"
        assert f"Rank {ODD} on" in text
        assert "waits there itself, so it is not slow: ranks made different numbers of" in text


def test_zeros_in_place_of_a_loss_are_exact():
    """On a rank without targets: DDP averages in their backward, though no output is in them."""
    for errors in run_workers(2, zeros_for_a_loss, timeout_s=60.0):
        assert len(errors) == 5
        assert max(errors) <= 1e-12


def test_a_rank_that_cannot_tell_its_batch_is_told_by_the_others():
    """The short last step has as many samples as a full one on two ranks, not on the third."""
    for text, error in run_workers(3, told_by_others, timeout_s=60.0):
        assert not text
        assert error <= 1e-12


@pytest.mark.parametrize("step", [0, 1, 2])
def test_parameters_without_a_part_in_the_loss_are_reported_by_the_rank_that_has_them(step):
    """In DDP's own words; also in the first step and in the last."""
    first, odd = run_workers(2, with_unused_parameters, step, timeout_s=50.0)

    assert "parameters that were not used in producing loss" in odd
    assert first.startswith("WorkerLostError: Rank 1")
