"""What others leave in the folder, and what they make of a checkpoint, is noticed and named."""

from __future__ import annotations

import hashlib
import json
import os
import shutil

import pytest
import torch

from evenstep.exceptions import CheckpointError, EvenstepWarning
from evenstep.torch import Checkpoint

from .checkpoint_forgery import INDEX, read_index
from .checkpoints import Training, plain_net, same


@pytest.fixture
def saved(tmp_path):
    """A run that has saved its steps 2 and 4, and the newer one's folder."""
    training = Training(tmp_path / "root")
    for first in (0, 2):
        training.run(first, first + 2)
        training.checkpoint.save(first + 2)
    return training, tmp_path / "root" / "step-00000004"


def sealed(folder):
    """Make the checksums fit what the files hold now."""
    body = json.loads((folder / "manifest.json").read_text())["body"]
    for name in body["files"]:
        body["files"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    summed = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps({"body": body, "sha256": summed}))


def put_index(folder, index):
    torch.save(index, folder / INDEX)
    sealed(folder)


def test_a_renamed_checkpoint_is_refused(saved):
    """Its step would be another: training would leave out what lies between. It is not removed."""
    training, folder = saved
    renamed = folder.rename(folder.with_name("step-00000009"))
    before = training.everything()

    with pytest.raises(CheckpointError, match=r"step-00000009` was saved after step 4 and renamed"):
        training.checkpoint.load()
    assert same(training.everything(), before)
    renamed.rename(folder)
    assert training.checkpoint.load() == 4


def test_a_pipe_in_the_place_of_a_manifest_is_not_waited_for(saved):
    """Whoever reads from one waits until somebody writes."""
    training, folder = saved
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")

    with pytest.warns(EvenstepWarning, match=r"manifest.json` is no file"):
        assert training.checkpoint.load() == 2


@pytest.mark.parametrize("what", ["file", "link", "broken link"])
def test_what_is_no_folder_does_not_stand_in_the_way(saved, tmp_path, what):
    """Under a checkpoint's name it is skipped with a warning, and goes with the next save."""
    training, folder = saved
    other = tmp_path / "other"
    name = folder.with_name("step-00000009")
    if what == "file":
        name.write_text("in the way")
    else:
        name.symlink_to(other)
    if what == "link":
        other.mkdir()
    with pytest.warns(EvenstepWarning, match="step-00000009"):
        assert training.checkpoint.load() == 4
    training.run(4, 5)
    training.checkpoint.save(5)

    assert not os.path.lexists(name)
    assert other.exists() == (what == "link")
    assert Training(folder.parent).checkpoint.load() == 5


def test_a_checkpoint_that_was_moved_away_and_linked_is_as_good_as_before(saved, tmp_path):
    """It loads, and the link goes when it is old enough; what it leads to stays."""
    training, folder = saved
    elsewhere = shutil.move(folder, tmp_path / "elsewhere")
    folder.symlink_to(elsewhere)
    assert training.checkpoint.load() == 4
    for step in (5, 6):
        training.checkpoint.save(step)

    assert not os.path.lexists(folder)
    assert (elsewhere / "manifest.json").is_file()


@pytest.mark.parametrize("name", ["step-000000009", "step-٠٠٠٠٠٠٠٩", "step-9"])
def test_names_that_no_save_gives_are_no_checkpoints(saved, name):
    """Whatever a number can be written like."""
    training, folder = saved
    folder.with_name(name).mkdir()

    assert training.checkpoint.load() == 4


def test_an_index_that_leads_out_of_the_folder_is_refused(saved, tmp_path):
    """No checksum holds for what lies there."""
    training, folder = saved
    index = read_index(folder)
    shutil.copy(folder / "__0_0.distcp", tmp_path / "other")
    for stored in index.storage_data.values():
        stored.relative_path = "../../other"
    put_index(folder, index)

    with pytest.raises(CheckpointError, match=r"reads from `../../other`, outside of its folder"):
        training.checkpoint.load()


def test_values_that_an_optimizer_cannot_take_are_an_error_that_names_the_folder(saved):
    """Torch's own errors are of many kinds; and the parts are as they were."""
    training, folder = saved
    index = read_index(folder)
    names = {key.fqn: key for key in index.storage_data}
    lr, params = (names[f"optimizer.param_groups.0.{name}"] for name in ("lr", "params"))
    index.storage_data[params] = index.storage_data[lr]
    put_index(folder, index)
    training.run(4, 5)
    steps = training.schedule.last_epoch

    with pytest.raises(CheckpointError, match=r"step-00000004` cannot be read: \w+Error: "):
        training.checkpoint.load()
    assert training.schedule.last_epoch == steps == 5


class Mute:
    """Cannot be written, and does not say why."""

    def __reduce__(self):
        raise AssertionError


class Holding:
    """Has a value for a state."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        raise AssertionError


@pytest.mark.parametrize(
    ("value", "reason"),
    [(Mute(), "got AssertionError"), (b"", "Unsupported global: GLOBAL bytes")],
)
def test_a_state_that_cannot_be_saved_is_refused_with_the_reason(tmp_path, value, reason):
    """Torch's own, without the advice around it; or at least what kind of error it was."""
    others = {"mine": Holding(value)}

    with pytest.raises(ValueError, match=rf"Checkpoint\(mine=...\)` must have .*{reason}"):
        Checkpoint(tmp_path, model=plain_net(), others=others).save(1)
