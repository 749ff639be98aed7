"""Accelerate's loop on uneven ranks trains what it trains in one process."""

from __future__ import annotations

import pytest

from evenstep.testing import run_workers

from .accelerate_runs import (
    CASES,
    WORLD_SIZE,
    alone,
    at_the_end,
    bare,
    by_recipe,
    by_recipe_alone,
    gathered,
    on_the_cluster,
    refused,
    resumed,
    switched_off,
    token_losses,
)
from .small import Sentences, distance

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Each case, as the cluster trains it and as one process does."""
    folder, names = str(tmp_path_factory.mktemp("accelerate")), tuple(CASES)
    ours = run_workers(WORLD_SIZE, on_the_cluster, folder, names)[0]
    theirs = run_workers(1, alone, folder, names)[0]
    return {name: (ours[name], theirs[name]) for name in names}


@pytest.mark.parametrize("name", CASES)
def test_it_ends_where_one_process_ends(runs, name):
    """Same parameters, steps and rates, whatever the plans; the short last batch included."""
    (ours, rates, length), (theirs, expected, plain_length) = runs[name]

    assert length == plain_length
    assert rates == pytest.approx(expected, rel=1e-12)
    assert distance(ours, theirs) <= 1e-9


def test_switched_off_every_epoch_has_its_steps(tmp_path):
    """`EVENSTEP=off`: as many, at the same rates, and ranks end alike."""
    ranks = run_workers(2, switched_off, str(tmp_path))

    for name in CASES:
        (ours, rates, length), (theirs, *_) = (rank[name] for rank in ranks)
        assert len(rates) >= 3
        assert length > 1
        assert ours.equal(theirs)


def test_a_saved_state_holds_the_position(tmp_path):
    """Registered, the loader goes on within an epoch: no sample is left out or repeated."""
    unbroken, again = run_workers(WORLD_SIZE, resumed, str(tmp_path))[0]

    assert distance(again, unbroken) <= 1e-9


@pytest.mark.parametrize("prepare", [False, True])
def test_a_state_of_an_epochs_end_goes_on_with_the_next(tmp_path, prepare):
    """Saved in its last batch, as after it: no order is repeated, whoever counts the epochs."""
    orders, found = run_workers(1, at_the_end, str(tmp_path), prepare)[0]

    assert len({tuple(order) for order in orders}) == 3
    assert found == {"in the last batch": orders[2], "after the loop": orders[2]}


def test_uneven_rows_are_gathered(tmp_path):
    """In a balanced loop each sample's once; loops for evaluation within it go on as they did."""
    found = run_workers(WORLD_SIZE, gathered, str(tmp_path))[0]
    labels = sorted(Sentences().labels.tolist())

    assert found["losses"] == WORLD_SIZE
    assert found["rows"] == [[1, 2, 3]] * 8 + [[1, 1]]  # in the last, one stands in for none
    assert sorted(found["names"]) == sorted(map(str, labels))
    assert sorted(found["of the loop"]) == sorted(found["metrics"]) == labels
    assert all(sorted(each) == [0, 1, 2, 3, 4, 5, 6] for each in found["evaluated"])
    assert found["still at work"]
    assert found["left"]
    assert found["as it was"]


def test_accelerates_recipe_for_unlike_lengths_is_exact_with_a_sum(tmp_path):
    """It divides by the targets of all ranks; without `loss_reduction="sum"` a warning says so."""
    (alone,) = run_workers(1, by_recipe_alone, str(tmp_path))
    for parameters, warned in run_workers(WORLD_SIZE, by_recipe, str(tmp_path)):
        assert (parameters - alone).norm() <= 1e-9 * alone.norm()
        assert len(warned) == 1
        assert 'weighted a second time: use `balance(..., loss_reduction="sum")`' in warned[0]


def test_a_model_whose_loss_counts_tokens_is_warned_of(tmp_path):
    """Once, where samples are counted and the loss is no sum."""
    for found in run_workers(2, token_losses, str(tmp_path)):
        assert {name: len(texts) for name, texts in found.items()} == {
            "causal": 1,
            "of tokens": 1,
            "of rows": 0,
            "unit": 0,
            "sum": 0,
        }
        assert "GPT2LMHeadModel returns is a mean over tokens" in found["causal"][0]
        assert 'set `unit="tokens"`' in found["of tokens"][0]


def test_what_cannot_be_balanced_is_refused(tmp_path):
    """Each with its name and what to do instead."""
    found = run_workers(2, refused, str(tmp_path))[0]
    said = {
        "optimizer": "Leave optimizers, schedulers",
        "two loaders": "one training loader",
        "no loader": "be given models and one `DataLoader`",
        "dispatcher": "a Stream, which is a stream. Load it whole, as by `load_dataset(...,",
        "stream": '`evenstep.torch.Balancer().prepare(model, loader, stream="same")`.',
        "batch sampler": "batches that torch makes",
        "compiled around DDP": "accelerator.prepare(torch.compile(model)",
        "skipped": "loader.skip(num_steps)",
        "skipped too far": "less than the epoch's 13 steps",
    }

    assert found.keys() == said.keys()
    assert [name for name, text in said.items() if text not in found[name]] == []


def test_a_loader_that_was_not_prepared_is_balanced_too(tmp_path):
    """Its first steps can be skipped, on every rank, for one loop; its sampler hears of epochs."""
    sizes = run_workers(WORLD_SIZE, bare, str(tmp_path))

    assert [each[:2] for each in sizes] == [([1, 1], [1]), ([2, 2], [2]), ([3, 3], [3])]
    assert sizes[0][2] == [0, 1, 7]
