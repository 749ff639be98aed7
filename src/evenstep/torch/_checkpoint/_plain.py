"""States that are read without running code that a file asks for, nor filling memory as it asks."""

from __future__ import annotations

import io
import os
import zipfile
from typing import Any, BinaryIO

import torch

from ...exceptions import invalid


def check_plain(argument: str, state: Any) -> None:
    """Raise unless ``state`` loads again as it is written, with ``weights_only=True``."""
    file = io.BytesIO()
    try:
        torch.save(state, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:  # pickle's and torch's own, of many kinds
        raise invalid(
            f"Checkpoint({argument}=...)",
            "have a state of plain values and tensors",
            reason(error),
            "Give it a `state_dict` that `torch.load(weights_only=True)` reads.",
        ) from error


def read_plain(file: BinaryIO) -> Any:
    """Return what ``torch.save`` wrote.

    Raises:
        ValueError: it unpacks to more than it is.
    """
    check_unpacked(file)
    return torch.load(file, weights_only=True, map_location="cpu")


def check_unpacked(file: Any) -> None:
    """Raise ValueError if an archive unpacks to more than it is: torch packs nothing."""
    limit, size = file.seek(0, os.SEEK_END), 0
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
    file.seek(0)
    if size > limit:
        raise ValueError(f"it would unpack to {size:,} bytes of {limit:,}")


def reason(error: Exception) -> str:
    """Return the one line that says it: torch's advice on what to trust stands around it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "Unpickler error: " in line]
    return [*telling, *lines, type(error).__name__][0]
