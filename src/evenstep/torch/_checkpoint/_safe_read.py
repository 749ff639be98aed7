"""Reads what `torch.distributed.checkpoint` wrote, without running code that a file asks for."""

from __future__ import annotations

import io
import pickle
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from ...exceptions import CheckpointError
from ._step_folder import reading

# What torch's own index of a checkpoint is made of, and nothing that does anything.
_ALLOWED = {
    "torch": {"Size", *(name for name, value in vars(torch).items() if type(value) is torch.dtype)},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
}


_LOADERS: dict[int, Any] = {**pickle._Unpickler.dispatch}  # by the byte that asks for each
_BUILD = pickle.BUILD[0]  # gives a state to an object


class SafeReader(FileSystemReader):
    """Torch's reader of a folder, whose index is a pickle of harmless classes or refused.

    Args:
        path: the folder.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index.

        Raises:
            CheckpointError: it names what no index of torch's does.
        """
        path = Path(self.path) / ".metadata"
        with reading(path):
            return self._metadata(_Unpickler(io.BytesIO(path.read_bytes()), path).load(), path)

    def _metadata(self, metadata: Any, path: Path) -> Metadata:
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"`{path}` is no index of a checkpoint.", path)
        for stored in (metadata.storage_data or {}).values():
            if Path(stored.relative_path).name != stored.relative_path:
                raise CheckpointError(
                    f"`{path}` reads from `{stored.relative_path}`, outside of its folder: it is "
                    f"refused.",
                    path,
                )
        if not isinstance(metadata.storage_meta, StorageMeta):
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class SafePlanner(DefaultLoadPlanner):
    """Torch's planner, which reads plain values as it reads tensors: with ``weights_only``."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Refuse whatever is no plain value, then let torch load it."""
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


class _Unpickler(pickle._Unpickler):
    """Python's own: slower than C's, which does not let a caller decide what a file may change."""

    stack: list[Any]

    def __init__(self, file: io.BytesIO, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if module == "pathlib._local":  # where Python 3.13 has its paths
            module = "pathlib"
        if name not in _ALLOWED.get(module, ()):
            raise CheckpointError(
                f"`{self._path}` asks for `{module}.{name}`, which no index of a checkpoint needs: "
                f"it is refused.",
                self._path,
            )
        return super().find_class(module, name)

    def load_build(self) -> None:
        # A state given to a class, or to a function, would be in force in all of the process:
        # with `Path.__fspath__` replaced, the next save removes any folder the file likes.
        if isinstance(self.stack[-2], type) or not is_dataclass(self.stack[-2]):
            raise CheckpointError(
                f"`{self._path}` changes more than its own values: it is refused.", self._path
            )
        _LOADERS[_BUILD](self)

    dispatch: ClassVar[dict[int, Any]] = {**_LOADERS, _BUILD: load_build}
