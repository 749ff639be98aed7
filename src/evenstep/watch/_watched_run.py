"""Where a script made its model and its loader, by the frames on the way there."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class CallSite:
    """Where a script made something that matters to balancing.

    Attributes:
        made: ``"DistributedDataParallel"``, ``"fully_shard"``, ``"FullyShardedDataParallel"`` or
            ``"DataLoader"``: the one that training reads.
        file: the innermost file of the user's own on the way there; empty where there is none.
        line: the line in it, from 1.
        library: the library that made it for the user, such as ``"accelerate"``; empty where the
            user's own line did.
    """

    made: str
    file: str
    line: int
    library: str


Frames = Sequence[tuple[str, int]]
MadeLoader: TypeAlias = tuple[Callable[[], Any], int, Frames]
"""What returns a loader while it is there, its data set's id, and the frames that made it."""
_OURS = Path(__file__).parent.as_posix() + "/"
_STDLIB = Path(sysconfig.get_path("stdlib")).as_posix() + "/"


def site_of(made: str, frames: Frames) -> CallSite:
    """Return where something was made.

    Args:
        made: what.
        frames: files and lines on the way there, innermost first. Those of torch, of Python and of
            this package are passed over.
    """
    library = ""
    for file, line in frames:
        path = file.replace("\\", "/")
        package = _package_of(path)
        if package is None:
            return CallSite(made, file, line, library)
        if package not in ("", "torch", "evenstep") and not library:
            library = package
    return CallSite(made, "", 0, library)


def _package_of(path: str) -> str | None:
    """Return which installed package a file is of, empty for Python's own; None for the user's."""
    for folder in ("/site-packages/", "/dist-packages/"):
        if folder in path:
            return path.rpartition(folder)[2].partition("/")[0].removesuffix(".py")
    if path.startswith(_OURS):
        return "evenstep"
    return "" if path.startswith(("<frozen", _STDLIB)) else None
