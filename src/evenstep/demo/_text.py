"""Real text that is on every machine: the sources of Python's own standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

_FOREIGN = {"site-packages", "dist-packages"}


class Corpus(Dataset[Tensor]):
    """Pieces of ``context + 1`` bytes: each byte but the last is followed by what to predict.

    Args:
        context: bytes a model sees at once, at least 1.
        folder: whose ``*.py`` files are read; None is the standard library.
    """

    def __init__(self, context: int, folder: Path | None = None) -> None:
        self.context = context
        self.data = _read(folder or Path(sysconfig.get_paths()["stdlib"]))

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.context
        return torch.from_numpy(self.data[start : start + self.context + 1].astype(np.int64))


def _read(folder: Path) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return all sources below ``folder`` as bytes, in the order of their paths."""
    # Sorted, so that every worker numbers the pieces alike.
    files = sorted(path for path in folder.rglob("*.py") if not _FOREIGN & set(path.parts))
    return np.frombuffer(b"\n".join(path.read_bytes() for path in files), dtype=np.uint8)
