"""DDP with its gradients averaged by shares, beside plain DDP."""

import pytest

from evenstep.testing import run_workers

from . import runs

pytestmark = pytest.mark.cluster

LIMITS = {"float64": 1e-12, "bfloat16": 1e-2, "autocast": 1e-4}


@pytest.fixture(scope="module")
def trained():
    return run_workers(3, runs.options)


@pytest.mark.parametrize("name", runs.OPTIONS)
def test_training_by_shares_is_training_by_ddp(trained, name):
    """Four steps, by another split in each, through the rebuild of the buckets."""
    for rank in trained:
        apart, moved = rank[name]
        assert apart <= LIMITS.get(name, 1e-6)
        assert not moved < 1e-4


@pytest.mark.gpu
def test_gradients_on_a_device_go_through_the_host():
    """Two ranks share a device; gloo carries what they push and pull."""
    for apart in run_workers(2, runs.on_a_device):
        assert apart < 1e-6


def test_a_model_with_the_hook_can_be_copied_and_pickled():
    """A second hook, and a DDP over other ranks, are refused by name."""
    for works, again, wrong in run_workers(2, runs.copies):
        assert works
        assert again.startswith("`shard_gradients(ddp)` must have no communication hook yet, got r")
        assert wrong.startswith("`shard_gradients(ddp)` must be over the reducer's 2 workers, got")
