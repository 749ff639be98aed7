"""The readers by themselves: of a manifest, of an index, of what a balancer has learnt."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import hypothesis.strategies as st
import torch
from hypothesis import given

from evenstep._planner import Job, Planner
from evenstep.exceptions import CheckpointError
from evenstep.policies import Auto
from evenstep.torch._checkpoint._step_folder import check_files, read_manifest
from evenstep.torch._checkpoint._tensors import CLASSES, SafeReader
from evenstep.torch._session import Estimates

from . import checkpoint_forgery as forgery
from .checkpoint_harm import BANK, bank, harms
from .checkpoint_runs import learnt, room, same

kinds = st.integers(0, len(BANK) - 1)
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
