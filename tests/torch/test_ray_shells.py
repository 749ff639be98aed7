"""Ray Train's wrapper around a loader, without Ray: sharded no more, and moved as before."""

import pytest

from evenstep.testing import run_workers

from .ray_shells import moved, refused, trained

pytestmark = pytest.mark.cluster


def test_a_loader_that_ray_prepared_ends_where_one_process_ends():
    """Under plans that change at every step; the script tells the sampler its epochs itself."""
    for found in run_workers(2, trained, 2):
        assert found["error"] <= 1e-12
        assert found["length"] == 5


def test_its_batches_go_to_rays_device():
    """In training and in an evaluation, which has each sample once."""
    found = run_workers(2, moved)

    assert [rank["devices"] for rank in found] == [{"meta"}, {"meta"}]
    assert sum(rank["evaluated"] for rank in found) == 50


def test_a_shard_of_ray_data_is_refused_with_the_remedy():
    """It is no `DataLoader`; the page says how to make one of it."""
    for text in run_workers(2, refused):
        assert 'stream="same"' in text
        assert "docs/recipes/ray.md" in text
