"""Compiled models under a watch."""

import pytest

from .runs import losses, said, start, torchrun, watched

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]


def test_a_compiled_model_computes_the_same():
    """What the watch put around DDP's forward is not compiled, and breaks no graph."""
    alone = start(torchrun("compiled"), SLOW="1", TORCH_LOGS="graph_breaks")
    done = watched(torchrun("compiled"), SLOW="1", TORCH_LOGS="graph_breaks")

    assert losses(done) == losses(alone)
    assert done.stderr.count("Graph break") == alone.stderr.count("Graph break")
    assert "for rank 1 (" in said(done)[0]
