"""Lightning's Fabric: two lines more, no second DDP, and every epoch its own order."""

from importlib.util import find_spec

import pytest

from evenstep.testing import run_workers

from .._tiers import slow_but
from .fabric_runs import (
    MISTAKES,
    interrupted,
    mistakes,
    steps_and_means,
    with_fabric,
)

NEEDS_LIGHTNING = pytest.mark.skipif(find_spec("lightning") is None, reason="needs lightning")


@NEEDS_LIGHTNING
@pytest.mark.cluster
@pytest.mark.parametrize(
    ("world_size", "sampler", "loop"),
    slow_but(
        [(2, "own", "steps")],
        [(2, "shuffle", "plain"), (3, "own", "plain"), (2, "own", "steps")],
    ),
)
def test_fabrics_own_example_ends_where_one_process_ends(world_size, sampler, loop):
    """After three epochs under plans that change at every step; the model stays Fabric's."""
    for found in run_workers(world_size, with_fabric, world_size, sampler, loop):
        assert found["error"] <= 1e-12
        assert found["kind"] == "_FabricModule"
        assert len(found["sizes"]) > 3


@pytest.mark.cluster
def test_a_wrapped_loader_goes_on_where_it_was():
    """Within an epoch; and the epochs after it have the orders that they would have had."""
    for found in run_workers(2, interrupted):
        assert found["error"] <= 1e-12


@pytest.mark.cluster
def test_batches_go_to_the_wrappers_device():
    """In steps and in an evaluation too, which keep what they can do."""
    found = run_workers(2, steps_and_means)[0]

    assert found == {"devices": {"meta"}, "mean": {"count": 1.0}, "length": 5}


@pytest.fixture(scope="module")
def refused():
    """Error texts by mistake, on both ranks."""
    return run_workers(2, mistakes)


@pytest.mark.cluster
@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_would_average_gradients_twice_or_never_is_refused(refused, mistake):
    """On every rank, with the remedy."""
    for texts in refused:
        assert MISTAKES[mistake][1] in texts[mistake]
