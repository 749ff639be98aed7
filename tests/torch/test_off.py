"""``EVENSTEP=off`` leaves the script plain, and every call in it goes on working."""

import pytest

from evenstep.testing import run_workers

from .off_runs import LOADERS, differing, everything, numbers, plain_and_off


@pytest.mark.cluster
def test_it_trains_as_plain_ddp_to_the_last_bit():
    """Without a hook on the model, and without a thread."""
    for found in run_workers(2, plain_and_off):
        assert found == {
            "alike": True,
            "kind": "DistributedDataParallel",
            "hooks": 0,
            "threads": 0,
        }


@pytest.fixture(scope="module")
def batches():
    """The numbers that each rank was given, by loader, epoch and batch."""
    return run_workers(2, numbers)


@pytest.mark.cluster
@pytest.mark.parametrize("name", LOADERS)
def test_ranks_train_on_samples_of_their_own(batches, name):
    """As many batches each, all samples of an epoch, and none twice but to fill up the last."""
    for epoch in (0, 1):
        mine, theirs = (rank[name][epoch] for rank in batches)
        parts = [{number for batch in part for number in batch} for part in (mine, theirs)]
        wanted = {"batches": 9, "the same stream": 12}.get(name, 13)

        assert [len(batch) for batch in mine] == [len(batch) for batch in theirs]
        assert parts[0] | parts[1] == set(range(wanted))
        assert len(parts[0] & parts[1]) <= 1


@pytest.mark.cluster
def test_a_shuffled_loader_has_another_order_in_every_epoch(batches):
    """Nobody has to call `set_epoch`."""
    first, second = batches[0]["shuffled"]

    assert first != second


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
