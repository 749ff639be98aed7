"""`Trainer` and Accelerate with FSDP2 train what they train in one process."""

import pytest

from evenstep.testing import run_workers

from . import accelerate_runs, trainer_runs
from .sharded_runs import LOOPS, TRAINED, TRAINED_STOCK, looped, trained
from .small import distance

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Each case, as the ranks train it, sharded, and as one process does."""
    folder = str(tmp_path_factory.mktemp("sharded"))
    size = trainer_runs.WORLD_SIZE
    ours = run_workers(size, trained, folder, "GPT2Block", TRAINED, False)[0]
    ours |= run_workers(size, trained, folder, "GPT2Block", TRAINED_STOCK[1:], True)[0]
    ours |= run_workers(size, trained, folder, "BertLayer", TRAINED_STOCK[:1], True)[0]
    theirs = run_workers(1, trainer_runs.alone, folder, TRAINED)[0]
    theirs |= run_workers(1, trainer_runs.stock_alone, folder, TRAINED_STOCK)[0]
    return {name: (ours[name], theirs[name]) for name in theirs}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TRAINED, *TRAINED_STOCK])
def test_trainer_ends_where_one_process_ends(runs, name):
    """Under plans that change at every step, with and without accumulation."""
    ours, theirs = runs[name]

    assert len(set(ours.sizes)) > 2
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-6)  # Trainer rounds them
    assert distance(ours.parameters, theirs.parameters) <= 1e-9


def test_accelerate_ends_where_one_process_ends(tmp_path):
    """Its own loop, with `accelerator.accumulate`; the short last batch included."""
    ours = run_workers(accelerate_runs.WORLD_SIZE, looped, str(tmp_path))[0]
    theirs = run_workers(1, accelerate_runs.alone, str(tmp_path), LOOPS)[0]

    for name in LOOPS:
        assert ours[name][1] == pytest.approx(theirs[name][1], rel=1e-12)
        assert distance(ours[name][0], theirs[name][0]) <= 1e-9
