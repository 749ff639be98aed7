"""Reads what `torch.distributed.checkpoint` wrote, with nothing but ``weights_only=True``.

Torch's own reader unpickles its index, and so runs what a file asks for. So the index is written
once more, as ``torch.save`` does, and read as weights are: torch makes no object but of the classes
that are named here.
"""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint import metadata as indexed
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import ReadItem

from ..._private_torch import checkpoint_classes
from ...exceptions import CheckpointError
from ._plain import check_unpacked, read_plain
from ._step_folder import INDEX, reading, write

CLASSES: Final = (
    indexed.BytesStorageMetadata,
    indexed.ChunkStorageMetadata,
    indexed.Metadata,
    indexed.MetadataIndex,
    indexed.TensorProperties,
    indexed.TensorStorageMetadata,
    *checkpoint_classes(),
)
"""What an index is made of: dataclasses and enums of torch's, which do nothing."""


def write_index(folder: Path, metadata: indexed.Metadata) -> None:
    """Write the index for ``SafeReader``, and have it on the disk."""
    plain = copy.copy(metadata)
    plain.storage_meta = None  # it names the folder, which may be moved
    file = io.BytesIO()
    torch.save(plain, file)
    write(folder / INDEX, file.getvalue())


class SafeReader(FileSystemReader):
    """Torch's reader of a folder, whose index holds harmless classes or is refused.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.transforms = _Unpacked()  # type: ignore[assignment]  # that is all torch calls

    def read_metadata(self, *args: Any, **kwargs: Any) -> indexed.Metadata:
        """Return the index.

        Raises:
            CheckpointError: it cannot be read so, or leads out of its folder.
        """
        path = Path(self.path) / INDEX
        with reading(path):
            with path.open("rb") as file, torch.serialization.safe_globals(list(CLASSES)):
                metadata = read_plain(file)
            return self._checked(metadata, path)

    def _checked(self, metadata: Any, path: Path) -> indexed.Metadata:
        if not isinstance(metadata, indexed.Metadata):
            raise CheckpointError(f"`{path}` is no index of a checkpoint.", path)
        for stored in (metadata.storage_data or {}).values():
            if Path(stored.relative_path).name != stored.relative_path:
                raise CheckpointError(
                    f"`{path}` reads from `{stored.relative_path}`, outside of its folder: it is "
                    f"refused.",
                    path,
                )
        metadata.storage_meta = indexed.StorageMeta(load_id=self.load_id)
        return metadata


class _Unpacked:
    """Hands items on as they are: torch's own would unpack what the index says is packed."""

    def transform_load_stream(
        self, item: ReadItem, packed: Sequence[str], raw: io.RawIOBase
    ) -> Any:
        """Return the stream of an item.

        Raises:
            ValueError: it unpacks to more than it is.
        """
        check_unpacked(_View(raw))
        return raw


class _View:
    """An item as zipfile reads it, from its end: torch's streams count from there the wrong way."""

    def __init__(self, raw: io.RawIOBase) -> None:
        raw.seek(0, os.SEEK_END)
        self._raw, self._size = raw, raw.tell()
        self.read, self.tell = raw.read, raw.tell

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        place = offset + {os.SEEK_CUR: self.tell(), os.SEEK_END: self._size}.get(whence, 0)
        self._raw.seek(place)
        return place


class SafePlanner(DefaultLoadPlanner):
    """Torch's planner, which reads plain values as it reads tensors: with ``weights_only``."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Refuse whatever is no plain value, then let torch load it."""
        read_plain(value)
        value.seek(0)
        super().load_bytes(read_item, value)
