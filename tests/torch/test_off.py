"""``EVENSTEP=off`` leaves the script plain, and every call in it goes on working."""

import pytest

from evenstep.testing import run_workers

from .off_runs import LOADERS, differing, everything, numbers, plain_and_off, resumed


@pytest.mark.cluster
def test_it_trains_as_plain_ddp():
    """Without a hook on the model, and without a thread: 1e-12 in double precision."""
    for found in run_workers(2, plain_and_off):
        assert found == {
            "alike": True,
            "kind": "DistributedDataParallel",
            "hooks": 0,
            "threads": 0,
        }


@pytest.fixture(scope="module")
def batches():
    """The numbers that each rank was given, by switch, rank, loader, epoch and batch."""
    return {switch: run_workers(2, numbers, switch) for switch in ("off", "on")}


@pytest.mark.cluster
@pytest.mark.parametrize("name", LOADERS)
def test_a_step_has_the_samples_of_a_balanced_run(batches, name):
    """In equal parts: of samplers with 10**10 indices too, and where ranks are seeded unlike."""
    for epoch in (0, 1):
        plain, balanced = (
            [sorted(mine + theirs) for mine, theirs in zip(*parts, strict=True)]
            for parts in ([rank[name][epoch] for rank in batches[way]] for way in ("off", "on"))
        )
        full = [rank[name][epoch][0] for rank in batches["off"]]

        assert plain == balanced
        assert list(map(len, full)) == [2, 2]


@pytest.mark.cluster
@pytest.mark.parametrize("switches", [("off", "on"), ("on", "off"), ("off", "off")])
def test_a_checkpoint_goes_on_with_the_other_switch(switches):
    """No sample of the epoch is left out or repeated."""
    mine, theirs = run_workers(2, resumed, switches)

    assert sorted(mine + theirs) == list(range(24))


@pytest.mark.cluster
def test_every_call_of_a_script_works(tmp_path):
    """Steps, means, weights, evaluation, checkpoints within an epoch."""
    for found in run_workers(2, everything, str(tmp_path)):
        assert found["before"] == ((), 0, found["steps"])
        assert found["means"] == [0.5, 0.5]
        assert abs(found["first"]) <= 1e-12
        assert (found["sizes"], found["server"]) == ((8, 8), False)
        assert found["left"] == found["steps"] - 2


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("values", "words"),
    [
        (["off", ""], "be the same on all ranks, got 'off' on rank 0 and 'on' on rank 1. Set"),
        (["on", "off"], "be the same on all ranks, got 'on' on rank 0 and 'off' on rank 1. Set"),
        (["off", "no"], '`EVENSTEP` must be "off", "on" or left out, got \'no\' on rank 1.'),
        (["0", "0"], '`EVENSTEP` must be "off", "on" or left out, got \'0\' on rank 0.'),
    ],
)
def test_ranks_that_differ_are_refused(values, words):
    """On both, and so is any other value."""
    for text in run_workers(2, differing, values):
        assert words in text


@pytest.mark.cluster
def test_on_and_nothing_balance():
    """The default."""
    assert run_workers(2, differing, ["on", ""]) == ["", ""]
