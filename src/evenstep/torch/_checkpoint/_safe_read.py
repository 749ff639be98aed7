"""Reads what `torch.distributed.checkpoint` wrote, with nothing but ``weights_only=True``.

Torch's own reader unpickles its index, and so runs what a file asks for. So the index is written
once more, as ``torch.save`` does, and read as weights are: torch makes no object but of the classes
that are named here.
"""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint import metadata as indexed
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import ReadItem

from ..._private_torch import checkpoint_classes
from ...exceptions import CheckpointError
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

    def read_metadata(self, *args: Any, **kwargs: Any) -> indexed.Metadata:
        """Return the index.

        Raises:
            CheckpointError: it cannot be read so, or leads out of its folder.
        """
        path = Path(self.path) / INDEX
        with reading(path):
            with torch.serialization.safe_globals(list(CLASSES)):
                metadata = torch.load(path, weights_only=True)
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


class SafePlanner(DefaultLoadPlanner):
    """Torch's planner, which reads plain values as it reads tensors: with ``weights_only``."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Refuse whatever is no plain value, then let torch load it."""
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)
