"""A save leaves training as it is, and so does a load that is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from evenstep.exceptions import CheckpointError
from evenstep.torch import Checkpoint

from .checkpoints import plain_net


def adamw(models):
    return {name: torch.optim.AdamW(models[name].parameters(), lr=0.1) for name in models}


@pytest.mark.parametrize("late", [False, True])
def test_a_save_before_the_first_step_changes_nothing(tmp_path, late):
    """Adam's count of steps begins with the first one, of one optimizer or of the second."""
    ends = []
    for saves in (False, True):
        torch.manual_seed(0)
        models = {"g": plain_net(), "d": plain_net()}
        adam = adamw(models)
        first = {"g", "d"} if not late else {"g"}
        if late:
            stepped(models, adam, first)
        if saves:
            Checkpoint(tmp_path, model=models, optimizer=adam).save(0)
            assert not adam["d"].state
            assert all(each.grad is None for each in models["d"].parameters())
        for _ in range(3):
            stepped(models, adam, {"g", "d"})
        ends.append([p for name in models for p in models[name].parameters()])
    assert all(map(torch.equal, *ends))

    torch.manual_seed(1)
    models = {"g": plain_net(), "d": plain_net()}
    adam = adamw(models)
    assert Checkpoint(tmp_path, model=models, optimizer=adam).load() == 0
    if late:
        assert all(values["step"] == 1 for values in adam["g"].state.values())
    assert not adam["d"].state
    for _ in range(3):
        stepped(models, adam, {"g", "d"})
    assert all(map(torch.equal, ends[0], [p for name in models for p in models[name].parameters()]))


def stepped(models, optimizers, names):
    """Do one step of some of the models."""
    for name in sorted(names):
        x = torch.linspace(-1, 1, 15, dtype=torch.float64).reshape(3, 5)
        models[name](x).square().mean().backward()
        optimizers[name].step()
        optimizers[name].zero_grad()


class Picky:
    """Holds a number; takes up none, or fails."""

    def __init__(self, error=None):
        self.held, self.error = 0, error

    def state_dict(self):
        return {"held": self.held}

    def load_state_dict(self, state):
        if self.error is not None and state["held"]:
            raise self.error
        self.held = state["held"]


@pytest.mark.parametrize("error", [ValueError("another batch"), KeyError("gone"), None])
def test_what_is_refused_half_way_changes_nothing(tmp_path, error):
    """Neither the model, nor the optimizer, nor the parts that were first."""
    kept, lost = Picky(), Picky()
    kept.held = lost.held = 3
    saved = plain_net()
    adam = torch.optim.AdamW(saved.parameters())
    parts = {"kept": kept, "lost": lost}
    stepped({"": saved}, {"": adam}, {""})
    Checkpoint(tmp_path, model=saved, optimizer=adam, others=parts).save(1)

    model = plain_net()
    if error is None:  # the shapes are what does not fit
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    adam = torch.optim.AdamW(model.parameters())
    before = [p.clone() for p in model.parameters()]
    parts = {"kept": Picky(), "lost": Picky(error)}
    kind = ValueError if isinstance(error, ValueError) else CheckpointError
    with pytest.raises(kind, match=r"another batch|KeyError: 'gone'|does not fit"):
        Checkpoint(tmp_path, model=model, optimizer=adam, others=parts).load()
    assert all(map(torch.equal, model.parameters(), before))
    assert not adam.state
    assert parts["kept"].held == 0


class Hanging:
    """A part whose state never loads, until it is interrupted."""

    def __init__(self):
        self.num_loads = 0

    def state_dict(self):
        return {"number": 1}

    def load_state_dict(self, state):
        self.num_loads += 1
        raise KeyboardInterrupt


def test_a_part_that_was_interrupted_is_not_loaded_again(tmp_path):
    """It may have hung, and would hang once more."""
    part = Hanging()
    checkpoint = Checkpoint(tmp_path, model=plain_net(), others={"part": part})
    checkpoint.save(0)

    with pytest.raises(KeyboardInterrupt):
        checkpoint.load()

    assert part.num_loads == 1
