"""A save is all or nothing, at every call that changes the disk, and on the disk as a whole."""

import errno
import multiprocessing
import os
import resource

import pytest
from torch import nn

from evenstep.exceptions import CheckpointError, EvenstepWarning
from evenstep.torch import Checkpoint

from .checkpoints import plain_net
from .saves import killed_while_saving_again


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
