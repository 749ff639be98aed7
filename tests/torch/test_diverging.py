"""A rank that goes another way than the others ends the run on all of them, by name."""

import pytest

from evenstep.testing import run_workers

from .diverging import ODD, WAYS, error_of

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_reduce_different_batches_end_at_once(way):
    """Not after a silent run on wrong gradients, nor after a wait for hang_s."""
    results = run_workers(2, error_of, way, timeout_s=60.0)

    for kind, text in results:
        assert kind == "RanksDivergedError", text
        assert f"Rank {ODD} reduced gradients of" in text
        assert "To skip one, skip it on all" in text
