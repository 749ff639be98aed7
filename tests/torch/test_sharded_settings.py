"""FSDP2 as it stands, in a plain loop: exact under sizes that change, and its time is known."""

import pytest

from evenstep.testing import run_workers

from .sharded_settings import NUM_STEPS, SETTINGS, WORLD_SIZE, after_all, every_setting

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def found():
    """What became of each setting, by rank."""
    return run_workers(WORLD_SIZE, every_setting, timeout_s=300)


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_gradient_is_that_of_one_process(found, setting):
    """Though ranks have different sizes, and others in each step."""
    sizes = found[0][setting].sizes

    assert max(each[setting].error for each in found) <= SETTINGS[setting].tolerance
    assert len(set(sizes)) >= min(WORLD_SIZE, NUM_STEPS - 1)


@pytest.mark.parametrize("setting", SETTINGS)
def test_own_time_is_known(found, setting):
    """Of every rank, so that sizes are planned by it."""
    assert found[0][setting].times >= NUM_STEPS - 1


def test_fsdp2_is_as_it_was_when_runs_are_over():
    """Its own code is changed while a run lasts, whichever of several ends first."""
    assert run_workers(2, after_all) == [(True, False)] * 2
