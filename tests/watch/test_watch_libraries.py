"""Libraries under a watch: none of them is told of it."""

import pytest

from .runs import SCRIPT, losses, said, start, torchrun, watched

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]


def test_accelerate():
    """Losses are the same bit by bit, and the slow rank is named."""
    done = watched(torchrun("accelerated"), SLOW="1")

    assert losses(done) == losses(start(torchrun("accelerated"), SLOW="1"))
    assert "for rank 1 (" in said(done)[0]


def test_trainer(tmp_path):
    """Likewise, with checkpoints in between."""
    done = watched(torchrun("trainer", tmp_path / "a"), SLOW="1")

    assert losses(done) == losses(start(torchrun("trainer", tmp_path / "b"), SLOW="1"))
    assert "for rank 1 (" in said(done)[0]


@pytest.mark.parametrize("launched", ["by torchrun", "by itself"])
def test_lightning(launched):
    """Likewise, also where Lightning starts the script again for the other ranks."""
    pytest.importorskip("lightning", reason="needs lightning")
    command = torchrun("lightning") if launched == "by torchrun" else [SCRIPT, "lightning"]
    done = watched(command, SLOW="1")

    assert losses(done) == losses(start(command, SLOW="1"))
    assert "for rank 1 (" in said(done)[0]
