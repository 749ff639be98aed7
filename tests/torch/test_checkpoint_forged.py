"""Right checksums are no licence: what a file asks for is not run, and what is refused is named."""

from __future__ import annotations

import io
import pickle
import shutil
import warnings

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given, settings

from evenstep.exceptions import CheckpointError

from . import checkpoint_forgery as forgery
from .checkpoint_harm import BANK, STEPS, bank, changes
from .checkpoint_runs import Run, disk, room, same

kinds = st.integers(0, len(BANK) - 1)
fewer = settings(max_examples=settings().max_examples // 2)  # a load takes 10 ms


def two(which, root):
    """Write two checkpoints; return a run of their kind, and the newer one's folder."""
    kind, (older, newer, _) = bank(which)
    older.put(disk.complete_folder(root, older.step))
    newer.put(disk.complete_folder(root, newer.step))
    return Run(root, kind), disk.complete_folder(root, newer.step), older


def outcome(run, *, changes_tensors):
    """Load, and check that what is refused changes nothing that it may not."""
    before = {"parts": run.parts(), "all": run.everything()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return run.checkpoint.load()
        except (CheckpointError, ValueError) as error:
            assert same(run.parts(), before["parts"])
            assert changes_tensors or same(run.everything(), before["all"])
            return error


def is_documented(came, newer):
    """Tell whether it loaded, or was refused by name: of the file, or of the part."""
    if isinstance(came, CheckpointError):
        return newer in (came.path, came.path.parent) and str(newer) in str(came)
    return came == STEPS[1] or ".load_state_dict(" in str(came)


def loads_the_older(run, newer, older):
    """Whatever was tried before, the next one comes as it was saved, in this run or a new one."""
    shutil.rmtree(newer)
    assert run.checkpoint.load() == older.step
    assert same(run.everything(), older.held)


@fewer
@given(which=kinds, harm=st.lists(changes, min_size=1, max_size=3))
def test_changed_bytes_load_or_are_refused(which, harm):
    """Nothing but the documented errors, and the parts are as they were."""
    with room() as root:
        run, newer, older = two(which, root)
        manifest = (newer / forgery.MANIFEST).read_bytes()
        for each in harm:
            each.do(newer, older.files)
        (newer / forgery.MANIFEST).write_bytes(manifest)
        forgery.sealed(newer)

        came = outcome(run, changes_tensors=True)
        assert is_documented(came, newer)
        loads_the_older(Run(root, run.kind), newer, older)


@fewer
@given(which=kinds, place=st.floats(0, 1, exclude_max=True), new=st.sampled_from(forgery.ODD))
def test_other_plain_values_load_or_are_refused(which, place, new):
    """Whatever stands at whichever place of the states, and then all is as it was."""
    with room() as root:
        run, newer, older = two(which, root)
        written = torch.load(newer / forgery.PLAIN, weights_only=True)
        changed = forgery.put(written, chosen(written, place), new)
        torch.save(changed, newer / forgery.PLAIN)
        forgery.sealed(newer)

        came = outcome(run, changes_tensors=False)
        assert is_documented(came, newer)
        loads_the_older(run, newer, older)


@fewer
@given(
    which=kinds,
    place=st.floats(0, 1, exclude_max=True),
    new=st.sampled_from((*forgery.ODD, forgery.put)),
    how=forgery.formats,
)
def test_another_index_loads_or_is_refused(which, place, new, how):
    """Values changed or lost: the parts are as they were, the classes too."""
    shared = forgery.shared()
    with room() as root:
        run, newer, older = two(which, root)
        index = forgery.read_index(newer)
        where = chosen(index, place)
        assume(where or new is not forgery.put)
        try:
            content = forgery.pickled(forgery.put(index, where, new), how)
        except Exception:  # not what torch's classes let be written
            assume(False)
        (newer / forgery.INDEX).write_bytes(content)
        forgery.sealed(newer)

        came = outcome(run, changes_tensors=True)
        assert is_documented(came, newer)
        assert forgery.shared() == shared
        loads_the_older(Run(root, run.kind), newer, older)


@fewer
@given(
    which=kinds,
    where=st.sampled_from([forgery.INDEX, forgery.PLAIN, "item"]),
    call=st.sampled_from(sorted(forgery.CALLS)),
    wrap=st.sampled_from(sorted(forgery.WRAPS)),
    how=forgery.formats,
    item=st.integers(0, 30),
)
def test_what_a_file_asks_for_is_not_run(which, where, call, wrap, how, item):
    """Not from the index, the plain values or an item, in no format; and the file is named."""
    with room() as root:
        run, newer, older = two(which, root)
        mark = root / "it-ran"
        asked = forgery.WRAPS[wrap](forgery.CALLS[call](str(mark)))
        content = forgery.pickled(asked, how)
        if where == "item":
            forgery.put_item(newer, content, item)
        else:
            (newer / where).write_bytes(content)
        forgery.sealed(newer)

        came = outcome(run, changes_tensors=where == "item")
        assert not mark.exists()
        if where == "item" and came == STEPS[1]:  # of an empty tensor nothing is read
            assert same(run.everything(), bank(which)[1][1].held)
        else:
            assert isinstance(came, CheckpointError)
            assert is_documented(came, newer)
        loads_the_older(Run(root, run.kind) if where == "item" else run, newer, older)


@pytest.mark.parametrize("where", [forgery.INDEX, forgery.PLAIN, "tensor", "value"])
def test_what_unpacks_to_more_than_its_file_is_refused_before_it_is_unpacked(where):
    """Torch packs nothing; a thousandth of the memory is enough to fill it."""
    with room() as root:
        run, newer, older = two(0, root)
        bomb = forgery.packed(1 << 22)
        if where in (forgery.INDEX, forgery.PLAIN):
            (newer / where).write_bytes(bomb)
        else:
            forgery.put_item(newer, bomb, forgery.item_of(newer, is_tensor=where == "tensor"))
        forgery.sealed(newer)

        came = outcome(run, changes_tensors=where in ("tensor", "value"))
        assert isinstance(came, CheckpointError)
        assert "4,194,306 bytes" in str(came)
        loads_the_older(Run(root, run.kind), newer, older)


def chosen(value, place):
    """Return the path to the place that stands so far down a nested value."""
    places = list(forgery.places_in(value))
    return places[int(place * len(places))]


def test_the_calls_would_run():
    """Each of them, where anything is unpickled: else nothing was shown above."""
    for name, call in forgery.CALLS.items():
        with room() as root:
            mark = root / "it-ran"
            if name != "getattr":
                pickle.load(io.BytesIO(pickle.dumps(call(str(mark)))))
                assert mark.exists(), name
