"""Files with something else in them, under checksums that are right."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import os
import pickle
import shutil
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from evenstep.torch._checkpoint._step_folder import INDEX
from evenstep.torch._checkpoint._tensors import CLASSES

PLAIN, MANIFEST = "plain.pt", "manifest.json"


def sealed(folder: Path) -> None:
    """Make the checksums those of what the files hold now, as a forger would."""
    written = json.loads((folder / MANIFEST).read_bytes())
    for name in written["body"]["files"]:
        written["body"]["files"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / MANIFEST).write_bytes(manifest(written["body"]))


def manifest(body: Any) -> bytes:
    """Return a manifest whose own checksum is right."""
    summed = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({"body": body, "sha256": summed}).encode()


class Call:
    """Calls a function where it is unpickled."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call

    def __call__(self) -> None:
        """Pickle asks for what can be called; what is written is the inner call."""


# What would make a file named ``mark``, were it called.
CALLS = {
    "folder": lambda mark: Call(os.mkdir, mark),
    "copy": lambda mark: Call(shutil.copyfile, __file__, mark),
    "eval": lambda mark: Call(eval, f"__import__('os').mkdir({mark!r})"),
    "exec": lambda mark: Call(exec, f"import os; os.mkdir({mark!r})"),
    "getattr": lambda mark: Call(Call(getattr, Path(mark), "touch")),
    "numbers": lambda mark: Call(np.savetxt, mark, [0]),
    "shell": lambda mark: Call(os.system, f"touch {mark}"),
    "start": lambda mark: Call(subprocess.check_call, ["touch", mark]),
    "torch": lambda mark: Call(torch.save, {}, mark),
    "touch": lambda mark: Call(Path.touch, Path(mark)),
}

WRAPS = {
    "bare": lambda call: call,
    "list": lambda call: [1, call],
    "key": lambda call: {(0, call): 1},
    "part": lambda call: {"step": 7, "part.held": {"value": call}},
    "index": lambda call: Metadata({}, planner_data=call),
    "names": lambda call: Metadata({"model.p0": call}, storage_data={}),
}


def changed_class(module: str, name: str, attribute: str) -> bytes:
    """Return a pickle that sets an attribute of a class, or of a function, for all of a process."""
    slots = pickle.dumps({attribute: 3}, protocol=2)[2:-1]
    state = pickle.MARK + pickle.NONE + slots + pickle.TUPLE
    named = pickle.GLOBAL + f"{module}\n{name}\n".encode()
    return pickle.PROTO + b"\x02" + named + state + pickle.BUILD + pickle.STOP


def read_index(folder: Path) -> Any:
    """Return the index of a checkpoint, as anything that is unpickled."""
    return torch.load(folder / INDEX, weights_only=False)


def item_of(folder: Path, *, is_tensor: bool) -> int:
    """Return the number, for ``put_item``, of the first item that is a tensor, or none."""
    index = read_index(folder)
    kinds = [
        isinstance(index.state_dict_metadata[key.fqn], TensorStorageMetadata)
        for key in sorted(index.storage_data, key=str)
    ]
    return kinds.index(is_tensor)


def put_item(folder: Path, content: bytes, which: int) -> None:
    """Have the index say that one of its items is ``content``."""
    index = read_index(folder)
    key = sorted(index.storage_data, key=str)[which % len(index.storage_data)]
    stored = index.storage_data[key]
    file = folder / stored.relative_path
    index.storage_data[key] = replace(stored, offset=file.stat().st_size, length=len(content))
    file.write_bytes(file.read_bytes() + content)
    torch.save(index, folder / INDEX)


def packed(num_zeros: int) -> bytes:
    """Return an archive like torch's whose pickle is zeros, which take a thousandth of the room."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(num_zeros))
        archive.writestr("archive/version", "3\n")
    return file.getvalue()


ODD = (
    *(None, True, -1, 0, 3, 2**70, 0.5, float("nan"), "", "x", "../x", "/dev/zero", "plain.pt"),
    *(b"x", [], {}, (), [1], {"a": 1}, (1, 2), torch.ones(2), torch.Size([10**6, 10**6])),
    *(torch.Size([0]), torch.Size([-1]), torch.float16, Metadata({}), Path("/x")),
)


def places_in(value: Any, path: tuple[Any, ...] = ()) -> Any:
    """Yield the places in a nested value, attributes of torch's index included."""
    yield path
    for key, item in _items(value) if len(path) < 20 else ():
        yield from places_in(item, (*path, key))


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return a copy of a nested value with another at one place; without it, if new is ``put``."""
    if not path:
        return new
    items = dict(_items(value))
    items[path[0]] = put(items[path[0]], path[1:], new)
    if items[path[0]] is put:
        del items[path[0]]
    if isinstance(value, dict):
        return items
    if isinstance(value, (list, tuple)):
        return list(items.values()) if isinstance(value, list) else tuple(items.values())
    other = copy.copy(value)
    vars(other).clear()
    vars(other).update(items)
    return other


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    return list(vars(value).items()) if type(value).__module__.startswith(_INDEX) else []


_INDEX = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")


def pickled(value: Any, how: int) -> bytes:
    """Return ``value`` as one of pickle's protocols, or torch's two formats, writes it."""
    if how < 6:
        return pickle.dumps(value, protocol=how)
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=how == 6)
    return file.getvalue()


def shared() -> list[dict[str, Any]]:
    """Return what belongs to the classes and functions that an index may name."""
    return [dict(vars(each)) for each in (*CLASSES, torch.Size, Path)]


formats = st.integers(0, 7)
