"""Whatever happens to the files, the newest checkpoint that is whole is loaded, or none."""

from __future__ import annotations

import os
import warnings
from itertools import takewhile

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from evenstep.exceptions import CheckpointError, EvenstepWarning

from .checkpoint_harm import BANK, STEPS, bank, harms
from .checkpoint_runs import Run, disk, room, same

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
