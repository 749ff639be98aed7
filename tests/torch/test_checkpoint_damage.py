"""Whatever happens to the files or is found there, the newest whole checkpoint is loaded."""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
import resource
import shutil
import warnings
from itertools import takewhile

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

from evenstep.exceptions import CheckpointError, EvenstepWarning
from evenstep.torch import Checkpoint

from .checkpoint_forgery import INDEX, read_index
from .checkpoint_harm import BANK, STEPS, bank, harms
from .checkpoint_runs import Run, disk, room, same
from .checkpoints import Training, plain_net
from .saves import killed_while_saving_again

# What may lie in the folder besides, and is no checkpoint: by name, and what it is.
beside = st.tuples(
    st.sampled_from(
        [
            *("step-9", "step-00000009.tmp", "Step-00000009", "step-000000009", "step--0000009"),
            *("step-٠٠٠٠٠٠٠٩", ".partial-00000009", "notes.txt", "lost+found", "step-00000009 "),
        ]
    ),
    st.sampled_from(["file", "folder", "whole", "pipe", "link"]),
)


def put_beside(root, name, what, saved):
    """Leave something in the folder of the checkpoints."""
    path = root / name
    if os.path.lexists(path):
        return
    if what == "file":
        path.write_bytes(b"{}")
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "link":
        path.symlink_to(root / "nowhere")
    elif what == "whole":
        saved.put(path)
    else:
        path.mkdir()


def loaded(run):
    """Load; return the step or the error, and the warnings."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            outcome = run.checkpoint.load()
        except CheckpointError as error:
            outcome = error
    assert all(each.category is EvenstepWarning for each in heard)
    return outcome, [str(each.message) for each in heard]


@settings(max_examples=settings().max_examples // 2)  # a load takes 10 ms
@given(
    which=st.integers(0, len(BANK) - 1),
    present=st.sets(st.integers(0, 2), min_size=1),
    harm=st.lists(st.tuples(st.integers(0, 2), harms), max_size=4),
    besides=st.lists(beside, max_size=2),
    saves=st.booleans(),
)
def test_the_newest_that_is_whole_is_loaded(which, present, harm, besides, saves):
    """All of it, with a warning for each that is newer; without one, an error and no change."""
    kind, bank_of = bank(which)
    with room() as root:
        folders = {STEPS[index]: disk.complete_folder(root, STEPS[index]) for index in present}
        for saved in bank_of:
            if saved.step in folders:
                saved.put(folders[saved.step])
        for index, each in harm:
            each.do(disk.complete_folder(root, STEPS[index]), bank_of[(index + 1) % 3].files)
        for name, what in besides:
            put_beside(root, name, what, bank_of[0])
        check(Run(root, kind), folders, bank_of, saves)


def check(run, folders, bank_of, saves):
    """Load what is there, and compare with what has to come of it."""
    before = run.everything()
    newest_first = [folders[step] for step in sorted(folders, reverse=True)]
    whole = {path: saved for path in newest_first for saved in bank_of if saved.is_whole(path)}
    skipped = list(takewhile(lambda path: path not in whole, newest_first))
    outcome, heard = loaded(run)

    assert len(heard) == len(skipped)
    assert all(str(path) in said for said, path in zip(heard, skipped, strict=True))
    if not whole:
        assert "holds no checkpoint that can be loaded. The oldest: " in str(outcome)
        assert skipped[-1] in (outcome.path, outcome.path.parent)
        assert same(run.everything(), before)
        return
    folder = newest_first[len(skipped)]
    found = whole[folder]
    if folder == folders.get(found.step):
        assert outcome == found.step
        assert same(run.everything(), found.held)
        if saves:
            goes_on(run, found.step, skipped)
    else:
        assert f"was saved after step {found.step} and renamed since" in str(outcome)
        assert outcome.path == folder
        assert same(run.everything(), before)


def goes_on(run, step, skipped):
    """The next save is the newest, and what was found damaged is gone."""
    run.go(step)
    run.checkpoint.save(step + 1)
    after = run.everything()

    assert not any(os.path.lexists(path) for path in skipped if path.name[-1] != str(step + 1))
    assert loaded(run.go(step + 1)) == (step + 1, [])
    assert same(run.everything(), after)


@pytest.mark.parametrize("what", ["file", "pipe"])
def test_something_else_in_the_place_of_the_folder_is_an_error(tmp_path, what):
    """And no new beginning."""
    put_beside(tmp_path, "root", what, None)

    with pytest.raises(CheckpointError, match="Not a directory"):
        Run(tmp_path / "root", BANK[0][0]).checkpoint.load()


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


def test_a_step_that_is_saved_again_is_never_lost(tmp_path):
    """Killed at any call in between, the first save is found or the second, and later this one."""
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        found = pool.apply_async(killed_while_saving_again, (str(tmp_path),)).get(timeout=120)

    values = [value for _, _, value in found]
    assert all(step == 7 for _, step, _ in found)
    assert values == sorted(values)
    assert {values[0], values[-1]} == {1.0, 2.0}
    assert values.count(2.0) > 2, "nothing was killed after the second was in place"


def test_an_old_checkpoint_that_cannot_be_removed_fails_no_save(tmp_path, monkeypatch):
    """As on NFS while a process has a file in it open: a warning says so, the new one counts."""
    checkpoint = Checkpoint(tmp_path, model=plain_net(), keep=1)
    checkpoint.save(1)

    def busy(path, **_):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), os.fspath(path))

    with monkeypatch.context() as nfs:
        nfs.setattr(os, "rmdir", busy)
        with pytest.warns(EvenstepWarning, match="step-00000001"):
            checkpoint.save(2)

    assert checkpoint.load() == 2
    checkpoint.save(3)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_a_disk_that_fills_up_in_a_save_is_an_error_and_the_one_before_stays(tmp_path):
    """It says so, where torch tells of positions alone; what was written fills the disk no more."""
    checkpoint = Checkpoint(tmp_path, model=nn.Linear(500, 500))
    checkpoint.save(1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, before[1]))
    with pytest.raises(CheckpointError, match=r"\.partial-00000002.*The disk may be full"):
        checkpoint.save(2)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert checkpoint.load() == 1
    checkpoint.save(3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


def test_all_of_a_checkpoint_is_on_the_disk_before_it_counts(tmp_path, monkeypatch):
    """Else a loss of power might take a part of it, when the one before is gone."""
    synced, sync = set(), os.fsync

    def noted(file):
        synced.add(os.fstat(file).st_ino)
        sync(file)

    monkeypatch.setattr(os, "fsync", noted)
    folder = Checkpoint(tmp_path, model=plain_net(), keep=1).save(1)

    assert [file.name for file in folder.iterdir() if file.stat().st_ino not in synced] == []
