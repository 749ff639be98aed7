"""Reads what `torch.distributed.checkpoint` wrote, without running code that a file asks for."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from ...exceptions import CheckpointError

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
        try:
            metadata = _Unpickler(io.BytesIO(path.read_bytes()), path).load()
        except CheckpointError:
            raise
        except Exception as error:  # a pickle that is none fails in every way there is
            raise CheckpointError(
                f"`{path}` is no index of a checkpoint: {error}.", path
            ) from error
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"`{path}` is no index of a checkpoint.", path)
        if metadata.storage_meta is None:
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


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise CheckpointError(
                f"`{self._path}` asks for `{module}.{name}`, which no index of a checkpoint needs: "
                f"it is refused.",
                self._path,
            )
        return super().find_class(module, name)
