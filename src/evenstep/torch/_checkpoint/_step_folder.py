"""A checkpoint's folder on disk: written beside, sealed with checksums, renamed into place.

A step that is saved again has a folder already, which no rename can replace. That one is set aside
first, and counts until the new one is in its place: killed at any moment, one of the two is found.

Assumed of the file system, NFS and Lustre included: a rename inside one folder is all or nothing,
what ``fsync`` has returned for survives, and other hosts see both once they open the folder anew.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ..._warning import warn
from ...exceptions import CheckpointError, invalid


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
    plain = [line for line in lines if "Unpickler error: " in line]
    return [*plain, *lines, type(error).__name__][0]


MANIFEST = "manifest.json"
INDEX = "index.pt"  # of the tensors, beside that of torch's own readers
_FORMAT = "evenstep-checkpoint-2"
_PARTIAL = ".partial-"
_ASIDE = ".aside-"  # before the name of a folder that another one is to replace
MOST_STEPS = 10**15 - 1  # what `complete_folders` finds
_COMPLETE = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,14})")  # what `complete_folder` gives


def partial_folder(root: Path, step: int) -> Path:
    """Return where the checkpoint of ``step`` is written."""
    return root / f"{_PARTIAL}{step:08d}"


def complete_folder(root: Path, step: int) -> Path:
    """Return where the checkpoint of ``step`` is once it is complete."""
    return root / f"step-{step:08d}"


def complete_folders(root: Path) -> list[tuple[int, Path]]:
    """Return the steps of all checkpoints that are in place, the newest first.

    One that was set aside for another is in place as long as the other is not.

    Raises:
        OSError: ``root`` is there, and cannot be read or is no folder.
    """
    try:
        names = sorted((path.name for path in root.iterdir()), key=lambda name: name[:1] != ".")
    except FileNotFoundError:
        return []
    newest = {name.removeprefix(_ASIDE): root / name for name in names}  # set aside come first
    matches = [(_COMPLETE.fullmatch(name), path) for name, path in newest.items()]
    return sorted(((int(match[1]), path) for match, path in matches if match), reverse=True)


def begin(root: Path, step: int) -> Path:
    """Make an empty folder to write to, and clear away what died half-written."""
    root.mkdir(parents=True, exist_ok=True)
    for aside in root.glob(f"{_ASIDE}*"):
        final = root / aside.name.removeprefix(_ASIDE)
        if final.exists():
            clear_away(aside)
        else:
            aside.rename(final)
    path = partial_folder(root, step)
    for partial in root.glob(f"{_PARTIAL}*"):
        if partial == path:
            remove(partial)  # or files of another save would be among those of this one
        else:
            clear_away(partial)
    path.mkdir()
    return path


def digest(path: Path) -> str:
    """Return the SHA-256 of a file.

    Raises:
        CheckpointError: it cannot be read.
    """
    with reading(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def seal(root: Path, step: int, *, world_size: int, digests: Mapping[str, str]) -> None:
    """Write the manifest, have all of it on the disk, and put the folder into its place.

    The rename comes last and is all or nothing: a folder of that name is complete, as far as the
    file system keeps its promises; where it does not, the checksums show it.
    """
    path = partial_folder(root, step)
    body = {
        "format": _FORMAT,
        "step": step,
        "world_size": world_size,
        "files": dict(sorted(digests.items())),
    }
    write(path / MANIFEST, json.dumps({"body": body, "sha256": _sum(body)}).encode())
    _sync(path)
    final = complete_folder(root, step)
    aside = root / f"{_ASIDE}{final.name}"
    if final.exists():  # of this step already, found broken or written twice
        final.rename(aside)
    path.rename(final)
    _sync(root)
    if aside.exists():
        clear_away(aside)


def remove(path: Path) -> None:
    """Remove a folder with all that is in it; of anything else in its place, the name alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def clear_away(path: Path) -> None:
    """Remove what is of no use; where that fails, say so: nothing depends on it.

    On NFS, a folder stays as long as a process has a file in it open.
    """
    try:
        remove(path)
    except OSError as error:
        warn(
            f"`{path}` is of no use any more and cannot be removed ({error}). Later saves try "
            f"again; remove it by hand if it stays."
        )


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Have whatever goes wrong inside name the file: torch and pickle fail in every way there is.

    Raises:
        CheckpointError: something went wrong.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {reason(error)}"
        raise CheckpointError(f"`{path}` cannot be read: {problem}.", path) from error


def read_manifest(path: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of the checkpoint in ``path``, by name.

    Raises:
        CheckpointError: the manifest is missing, damaged, or none.
    """
    file = path / MANIFEST
    if not file.is_file():  # to read from a pipe is to wait for ever
        problem = "is no file" if file.exists() else "is missing"
        raise CheckpointError(
            f"`{file}` {problem}: the folder is no complete checkpoint, or was made by something "
            f"else.",
            file,
        )
    try:
        written = json.loads(file.read_bytes())
        body: dict[str, Any] = written["body"]
        digests: dict[str, str] = body["files"]
        is_whole = written["sha256"] == _sum(body) and body["format"] == _FORMAT
        is_whole &= all(type(body[key]) is int for key in ("step", "world_size"))
        if is_whole and type(digests) is dict and all(Path(at).name == at for at in digests):
            return digests  # nothing outside of the folder is a part of it
        problem = "its own checksum or format is off"
    except (OSError, LookupError, TypeError, ValueError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise CheckpointError(f"`{file}` is damaged or no manifest of evenstep's: {problem}.", file)


def check_files(path: Path, digests: Mapping[str, str], names: Iterable[str]) -> None:
    """Raise unless the files of these names have the checksums that the manifest says.

    Raises:
        CheckpointError: one of them is missing, truncated or changed.
    """
    for name in names:
        if not (path / name).is_file():
            raise CheckpointError(f"`{path / name}` is missing.", path / name)
        if digest(path / name) != digests[name]:
            raise CheckpointError(
                f"`{path / name}` is damaged: its checksum is not the one it was written with.",
                path / name,
            )


def write(path: Path, content: bytes) -> None:
    """Write a file and have it on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sum(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _sync(folder: Path) -> None:
    """Have the names in ``folder`` on the disk, where folders can be synced at all."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except PermissionError:  # Windows
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
