"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def write_whole(file: Path, parts: Iterable[str]) -> None:
    """Write a file whole or not at all: what stands there is replaced once all is written.

    A pipe or a device is written as it is.

    Raises:
        OSError: it cannot be written.
    """
    is_plain = file.is_file() or not file.exists()
    if is_plain:
        file = Path(os.path.realpath(file))  # a link stays one
    partial = file.with_name(f"{file.name}.partial") if is_plain else file
    try:
        with partial.open("w", encoding="utf-8") as out:
            out.writelines(parts)
        if is_plain:
            os.replace(partial, file)
    except BaseException:
        if is_plain:
            with suppress(OSError):
                partial.unlink()
        raise
