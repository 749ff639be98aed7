"""What would not load is refused before it is saved, with the argument's name."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from evenstep.exceptions import CheckpointError
from evenstep.torch import Checkpoint

from .checkpoints import plain_net


class Secretive:
    """Has a state of its own kind."""

    def state_dict(self):
        return {"me": self}

    def load_state_dict(self, state):
        raise AssertionError


def test_a_state_that_would_not_load_is_refused_when_it_is_saved(tmp_path):
    """Not after the crash."""
    checkpoint = Checkpoint(tmp_path, model=plain_net(), others={"mine": Secretive()})

    with pytest.raises(ValueError, match=r"Checkpoint\(mine=...\)` must have a state of plain"):
        checkpoint.save(1)
    assert list(tmp_path.iterdir()) == []


def test_a_setting_that_would_not_load_is_refused_when_it_is_saved(tmp_path):
    """The optimizer's groups may hold anything."""
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["owner"] = Secretive()

    with pytest.raises(
        ValueError, match=r"Checkpoint\(optimizer=...\)` must have a state of plain"
    ):
        Checkpoint(tmp_path, model=model, optimizer=optimizer).save(1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep": 0}, r"Checkpoint\(keep=...\)` must be at least 1, got 0"),
        ({"model": "gpt"}, r"Checkpoint\(model=...\)` must be one Module"),
        ({"optimizer": 3}, r"Checkpoint\(optimizer=...\)` must be one Optimizer"),
        ({"loader": object()}, r"Checkpoint\(loader=...\)` must have `state_dict`"),
        ({"others": {"loader": Secretive()}}, r"Checkpoint\(others=...\)` must use names"),
    ],
)
def test_what_cannot_be_saved_is_refused(tmp_path, arguments, message):
    """At once, with the argument's name."""
    with pytest.raises(ValueError, match=message):
        Checkpoint(tmp_path, **{"model": plain_net(), **arguments})


def test_a_bucket_is_no_folder():
    """It would become a local folder `s3:`."""
    with pytest.raises(ValueError, match="must be a folder of a file system"):
        Checkpoint("s3://bucket/runs", model=plain_net())


def test_a_negative_step_is_refused(tmp_path):
    """Names of folders sort by it."""
    with pytest.raises(ValueError, match=r"Checkpoint.save\(step\)` must be at least 0, got -1"):
        Checkpoint(tmp_path, model=plain_net()).save(-1)


@pytest.mark.parametrize("kind", [np.int64, torch.tensor, bool])
def test_a_step_may_be_any_integer(tmp_path, kind):
    """Of NumPy, in a tensor, a truth value: what is saved can be found and loaded."""
    checkpoint = Checkpoint(tmp_path, model=plain_net())
    assert checkpoint.save(kind(1)).name == "step-00000001"
    assert checkpoint.load() == 1


@pytest.mark.parametrize(
    ("step", "rule"), [(2.0, "an integer, got 2.0"), (10**15, "at most 9{15}")]
)
def test_a_step_that_would_not_be_found_is_refused_when_it_is_saved(tmp_path, step, rule):
    """Not after the crash."""
    with pytest.raises(ValueError, match=rf"Checkpoint.save\(step\)` must be {rule}"):
        Checkpoint(tmp_path, model=plain_net()).save(step)
    assert list(tmp_path.iterdir()) == []


class Closureless(torch.optim.SGD):
    """Steps as many a research optimizer does."""

    def step(self):
        super().step()


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Closureless])
def test_an_optimizer_that_would_not_load_is_refused(tmp_path, kind):
    """Not after the crash. Among the others it is saved and loaded."""
    saved, loaded = ((net, kind(net.parameters(), lr=0.1)) for net in (plain_net(), plain_net()))
    with pytest.raises(ValueError, match=rf"must be loadable: .*, got {kind.__name__}.step\("):
        Checkpoint(tmp_path, model=saved[0], optimizer=saved[1])

    saved[1].param_groups[0]["lr"] = 0.5
    for save, (model, optimizer) in ((True, saved), (False, loaded)):
        checkpoint = Checkpoint(tmp_path, model=model, others={"optimizer": optimizer})
        checkpoint.save(1) if save else checkpoint.load()
    assert loaded[1].param_groups[0]["lr"] == 0.5


def test_a_folder_that_cannot_be_written_is_an_error_that_names_it(tmp_path):
    """With the system's own reason."""
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(CheckpointError, match=r"file/c/.*Not a directory"):
        Checkpoint(tmp_path / "file" / "c", model=plain_net()).save(1)
