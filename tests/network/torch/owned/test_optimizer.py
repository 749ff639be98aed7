"""The optimizer kept at the owners: as torch's own, under any plan."""

import numpy as np
import pytest
import torch

from evenstep.testing._workers import run_workers

from . import runs

pytestmark = pytest.mark.cluster


def test_every_optimizer_is_torchs_own_under_any_plan():
    """Parameters and state, bit for bit, in every step, though each has another plan."""
    for found in run_workers(3, runs.follow):
        assert found.keys() == runs.MAKES.keys()
        for name, steps in found.items():
            assert steps == [(True, True)] * len(runs.PLANS), name


def test_training_goes_on_on_other_ranks_under_another_plan(tmp_path):
    """Three ranks, one, four, two, some owning nothing, from files of plain torch's form."""
    step = 0
    for shares in ([1, 0, 2], [1], [0, 3, 1, 1], [5, 2]):
        run = (str(tmp_path), step, step + 2, shares)
        assert run_workers(len(shares), runs.hand_over, *run) == [True] * len(shares)
        step += 2
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    plain = runs.MAKES["AdamW"](runs.Net().groups())
    plain.load_state_dict(saved["optimizer"])

    assert runs.same_state(plain.state_dict(), saved["optimizer"])


@pytest.mark.parametrize("reduced", [False, True])
def test_a_usual_training_ends_where_torchs_own_does(reduced):
    """With a scaler that skips a step, clipping, a scheduler, edited settings and a closure.

    Whoever sums the gradients.
    """
    sharded = run_workers(3, runs.train, True, reduced)
    plain = run_workers(3, runs.train, False, reduced)

    for mine, theirs in zip(sharded, plain, strict=True):
        assert all(map(np.array_equal, mine.pop("parameters"), theirs.pop("parameters")))
        assert mine == theirs
        assert mine["stale"]  # a backward through what was overwritten is refused
        assert mine["scale"] < 1024  # a step was skipped


def test_groups_of_ranks_keep_to_themselves():
    """With several optimizers each; who parts is named with the rank that everybody knows."""
    for rank, (well, said) in enumerate(run_workers(4, runs.pairs)):
        assert well
        assert said.startswith(f"On rank {2 + rank % 2}, `param_groups` has other settings")


def test_memory_and_bytes_follow_the_shares():
    """State twice the owned parameters; a step sends them to all others, a plan what changes."""
    total = 4 * (256 * 256 + 256) * 4
    ranks = run_workers(4, runs.measure)
    table = np.array(ranks, float) / total  # (rank, plan, what)
    shares = np.array([[2, 2, 2, 2], [4, 2, 1, 1], [4, 2, 2, 0], [0, 0, 0, 8]]).T / 8

    assert table[..., 0] == pytest.approx(2 * shares, abs=0.01)
    assert (table[..., 0][shares == 0] == 0).all()
    assert table[..., 1] == pytest.approx(3 * shares, abs=0.02)
    assert table[..., 2] == pytest.approx(1 - shares, abs=0.01)
    came = table[:, 1:, 3].sum(axis=0)
    # Ranges lie one after the other: between plans, so much of the line changes hands.
    assert came == pytest.approx(2 * np.array([5 / 8, 1 / 8, 1]), abs=0.02)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad"])
def test_checkpoints_load_under_any_plan_and_into_torchs_own(tmp_path, name):
    """Sharded on three, on two under another plan, then without; a save changes nothing."""
    folder = str(tmp_path)
    for begun, shares in ((0, [0, 2, 1]), (3, [1, 4]), (6, None), (9, [1, 1])):
        world_size = 1 if shares is None else len(shares)
        run = (folder, begun + 3, shares, name)
        untouched = name != "Adagrad" or bool(begun)  # it begins with a state
        for result in run_workers(world_size, runs.checkpointed, *run):
            assert result == (begun, True, untouched)
