"""Right checksums are no licence: what a file asks for is not run, and what is wrong is named."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import warnings
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given, settings

from evenstep._planner import Job, Planner
from evenstep.exceptions import CheckpointError
from evenstep.policies import Auto
from evenstep.torch._checkpoint._step_folder import check_files, read_manifest
from evenstep.torch._checkpoint._tensors import CLASSES, SafeReader
from evenstep.torch._session import Estimates

from . import checkpoint_forgery as forgery
from .checkpoint_harm import BANK, STEPS, bank, changes, harms
from .checkpoint_runs import Run, disk, learnt, room, same

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


documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3)
    ),
    max_leaves=6,
)
names = st.sampled_from(["plain.pt", ".metadata", "../x", "/etc/passwd", "a/b", "", "..", "a\0b"])
fields = {
    "format": st.just("evenstep-checkpoint-2"),
    "step": st.integers(0, 99),
    "world_size": st.integers(1, 9),
    "files": st.dictionaries(st.sampled_from(["plain.pt", ".metadata"]), st.text()),
}
off = {**fields, "files": st.dictionaries(names, documents, max_size=3)}
right = st.fixed_dictionaries(fields)
odd = st.sampled_from([None, True, 1.5, float("inf"), "3", [], [["plain.pt", "0"]]]) | documents
bodies = st.one_of(
    right,
    st.fixed_dictionaries(off),
    st.builds(lambda body, key, value: {**body, key: value}, right, st.sampled_from([*off]), odd),
    documents,
)


def is_body(body):
    """Tell whether it says what a manifest says."""
    return (
        type(body) is dict
        and body.get("format") == "evenstep-checkpoint-2"
        and all(type(body.get(key)) is int for key in ("step", "world_size"))
        and type(body.get("files")) is dict
        and not any("/" in name or name == "." for name in body["files"])
    )


@given(body=bodies, raw=st.sampled_from([None, None, None, b"", b"{", b"[]"]) | st.binary())
def test_a_manifest_is_read_or_refused(body, raw):
    """With a right checksum of its own, too; nothing outside of the folder is a part of one."""
    with room() as folder:
        file = folder / "manifest.json"
        file.write_bytes(forgery.manifest(body) if raw is None else raw)
        manifest = tried(read_manifest, folder)
        if isinstance(manifest, CheckpointError):
            assert manifest.path == file
            assert raw is not None or not is_body(body)
            return
        assert raw is None
        assert is_body(body)
        assert same(manifest, body["files"])
        for name in manifest:
            missing = tried(check_files, folder, manifest, [name])
            assert str(missing) == f"`{folder / name}` is missing."


def tried(read, *given):
    """Return what a reader gives, or its error if it is the documented one."""
    try:
        return read(*given)
    except CheckpointError as error:
        return error


@given(body=right, key=st.sampled_from(["step", "world_size", "files"]), how=st.booleans())
def test_a_manifest_that_was_changed_is_refused(body, key, how):
    """A digit is enough, where the checksum is the one from before."""
    changed = {**body, "files": {**body["files"], "more": ""}} if key == "files" else {**body}
    if key != "files":
        changed[key] += 1 if how else 10
    with room() as folder:
        file = folder / "manifest.json"
        written = json.loads(forgery.manifest(body))
        file.write_text(json.dumps({**written, "body": changed}))

        assert isinstance(tried(read_manifest, folder), CheckpointError)


@given(which=kinds, harm=st.lists(harms, max_size=3), raw=st.none() | st.binary(max_size=60))
def test_an_index_is_read_or_refused(which, harm, raw):
    """Whatever bytes there are; and it is what was written, if they are."""
    written = bank(which)[1][0].files[forgery.INDEX]
    shared = forgery.shared()
    with room() as root:
        folder = root / "folder"
        folder.mkdir()
        file = folder / forgery.INDEX
        file.write_bytes(written if raw is None else raw)
        for each in harm:
            if file.is_file() and "folder" not in each.how:
                each.do(folder, {forgery.INDEX: bank(which)[1][1].files[forgery.INDEX]})
        if file.exists() and not file.is_file():
            return  # its name is in the manifest, and `check_files` asks for a file
        index = tried(SafeReader(folder).read_metadata)
        if isinstance(index, CheckpointError):
            assert index.path == file
            assert not file.exists() or file.read_bytes() != written
        else:
            assert file.read_bytes() != written or index == expected(written, index)
        assert forgery.shared() == shared


def expected(written, index):
    """Return the index that was written, with what a reader adds to it."""
    whole = torch.load(io.BytesIO(written), weights_only=False)
    whole.storage_meta = index.storage_meta
    return whole


def test_an_index_changes_no_class_and_no_function():
    """A path's `__fspath__` replaced, the next save would remove whatever the file likes."""
    shared = forgery.shared()
    with room() as folder:
        for named in (*CLASSES, torch.Size, Path):
            for attribute in ("__fspath__", "__init__", "cache", "prefix"):
                content = forgery.changed_class(named.__module__, named.__name__, attribute)
                (folder / forgery.INDEX).write_bytes(content)
                refused = tried(SafeReader(folder).read_metadata)
                assert isinstance(refused, CheckpointError)
                assert forgery.shared() == shared
        assert os.fspath(folder) == str(folder)


tensors = st.sampled_from(
    [
        *(torch.ones(2), torch.tensor(1), torch.zeros(0), torch.zeros((7, 3, 3)).double()),
        *(torch.ones(3, requires_grad=True), torch.ones(3).to_sparse(), torch.ones(3).bfloat16()),
        *(torch.ones(3, dtype=torch.complex64).conj(), torch.ones(3, device="meta")),
        *(torch.full((3,), value, dtype=torch.float64) for value in (float("nan"), -1, 1e300)),
    ]
)


def deep():
    """Return lists in lists, more of them than can be called into each other."""
    value = []
    for _ in range(2000):
        value = [value]
    return value


@given(
    world_size=st.integers(0, 4),
    changes=st.lists(
        st.tuples(
            st.floats(0, 1, exclude_max=True),
            st.sampled_from([*forgery.ODD, forgery.put, object(), deep]) | documents | tensors,
        ),
        max_size=3,
    ),
)
def test_what_was_learnt_is_read_or_refused(world_size, changes):
    """What is read is of use or does no harm; what is unchanged comes back."""
    state = learnt(world_size)
    for place, new in changes:
        places = list(forgery.places_in(state))
        where = places[int(place * len(places))]
        if where or new is not forgery.put:
            state = forgery.put(state, where, deep() if new is deep else new)
    try:
        estimates = Estimates.read(state)
    except ValueError as error:
        assert changes
        assert "must come from `Balancer.state_dict()`" in str(error)  # noqa: PT017
        return
    planner = Planner(Auto(), Job(3, 30))
    estimates.apply(planner, ("n0 cpu", "n1 cpu", "elsewhere"))

    assert sum(planner.plan.batch_size) == 30
    assert changes or same(estimates.state_dict(), learnt(world_size))
