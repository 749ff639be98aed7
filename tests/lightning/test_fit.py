"""Lightning's Trainer on uneven ranks trains what it trains in one process, by one callback."""

import pytest

from evenstep.testing import run_workers

from .._tiers import slow_but
from .ended_runs import MISTAKES, losing, mistakes
from .fit_runs import (
    CASES,
    NUM_HELD_OUT,
    SAVED,
    alone,
    balanced,
    decided,
    resumed,
    saved,
    switched_off,
    twice,
)
from .hook_runs import hooked

pytestmark = pytest.mark.cluster
FIRST = next(iter(CASES))
RUNS = [(2, FIRST), *((3, name) for name in CASES)]


@pytest.fixture(scope="module")
def runs():
    """Each case on so many ranks, beside one process; made when it is first asked for."""
    found = {}

    def run(world_size, name):
        if (world_size, name) not in found:
            ours = run_workers(world_size, balanced, world_size, name)
            found[world_size, name] = ours, alone(name)
        return found[world_size, name]

    return run


def distance(ours, theirs):
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize(("world_size", "name"), slow_but([(2, FIRST)], RUNS))
def test_it_ends_where_one_process_ends(runs, world_size, name):
    """Parameters agree to rounding, after as many steps, under plans that change at each."""
    ranks, theirs = runs(world_size, name)
    for ours in ranks:
        assert len(set(ours.sizes)) > 2
        assert ours.num_steps == theirs.num_steps
        assert distance(ours.parameters, theirs.parameters) <= 1e-9


@pytest.mark.parametrize(("world_size", "name"), slow_but([(2, FIRST)], RUNS))
def test_what_is_logged_is_what_one_process_logs(runs, world_size, name):
    """Of steps and of epochs, in training and validation, on every rank."""
    ranks, theirs = runs(world_size, name)
    for ours in ranks:
        for kind, values in theirs.told.items():
            assert ours.told[kind] == pytest.approx(values, rel=1e-9), kind


@pytest.mark.slow
def test_what_hooks_log_is_what_one_process_logs():
    """With `sync_dist=True`, before a step, within it and after it, in validation too."""
    theirs = hooked(0, 1)
    for ours in run_workers(2, hooked, 2):
        for name, values in theirs.items():
            assert ours[name] == pytest.approx(values, rel=1e-9), name


def test_each_held_out_sample_is_validated_once(runs):
    """In each of two validations, over all ranks."""
    ranks, _ = runs(2, FIRST)

    assert sum(ours.num_validated for ours in ranks) == 2 * NUM_HELD_OUT


@pytest.mark.slow
@pytest.mark.parametrize(("where", "world_size"), [*((where, 2) for where in SAVED), ("within", 3)])
def test_it_goes_on_where_a_checkpoint_was_saved(tmp_path, where, world_size):
    """By Lightning itself, with what was learnt, also on another number of ranks."""
    whole = run_workers(2, saved, 2, str(tmp_path), where)[0]
    for found in run_workers(world_size, resumed, world_size, str(tmp_path), where):
        assert 3 <= len(found["fitted"].sizes) < len(whole.sizes)
        assert found["fitted"].num_steps == whole.num_steps
        assert len(found["saved"]) == 2
        assert distance(found["fitted"].parameters, whole.parameters) <= 1e-9


@pytest.mark.slow
def test_a_balanced_checkpoint_is_no_trap_for_a_plain_trainer(tmp_path):
    """Which begins the epoch again, as with any loader that has no state."""
    where = "within, asked late"
    run_workers(2, saved, 2, str(tmp_path), where)
    for found in run_workers(2, resumed, 2, str(tmp_path), where, True):
        assert found["fitted"].num_steps == 10


@pytest.mark.slow
def test_switched_off_it_is_lightning_itself():
    """`EVENSTEP=off`: the parameters and logs of a plain trainer, bit for bit."""
    for plain, ours in run_workers(2, switched_off):
        assert ours.parameters.equal(plain.parameters)
        assert ours.told == plain.told


@pytest.mark.slow
def test_a_trainer_fits_again_and_is_left_as_it_was():
    """One callback for several fits, with plain validations between and after."""
    for found in run_workers(2, twice):
        assert len(found["loss"]) == 10
        assert all(found["sizes"])
        assert found["patches"] == []
        assert found["hooks"] == 0


@pytest.mark.slow
def test_ranks_decide_within_a_step():
    """What a step asks for by itself is there at once; what it logs is reduced later."""
    for found in run_workers(2, decided):
        assert found == [3.0] * 5


@pytest.mark.slow
def test_what_cannot_be_balanced_is_refused_on_every_rank():
    """With the remedy; the next fit of the process begins anew."""
    for texts in run_workers(2, mistakes):
        for name, (_, _, remedy) in MISTAKES.items():
            assert remedy in texts[name]


@pytest.mark.slow
def test_a_lost_rank_is_named():
    """By the error that ends the fit on the others."""
    text = run_workers(2, losing, check=False, stop_after=2)[0]

    assert text.startswith("WorkerLostError: Rank 1 ")
