"""Everything that can happen to the files of a checkpoint, and whether one is still whole."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import torch

from .checkpoint_runs import Kind, Run, room

STEPS = (2, 4, 7)
MANIFEST = "manifest.json"
BANK = (
    (Kind(((3, 2), ()), torch.float64, (((2,), torch.int64),), "adamw", True), 3),
    (Kind(((5,), (0,), (2, 2, 2)), torch.bfloat16, (), "none"), 1),
    (Kind(((4, 3), (4,)), torch.float32, (((), torch.bool),), "sgd"), 2),
    (Kind(((2,),), torch.float64, (), "unstarted"), 5),
)


@dataclass(frozen=True)
class Saved:
    """A checkpoint as it was written: the bytes of its files, and what a run had then."""

    step: int
    files: dict[str, bytes]
    held: dict[str, Any]

    def put(self, folder: Path) -> None:
        """Write it to where it is to be."""
        folder.mkdir(parents=True)
        for name, content in self.files.items():
            (folder / name).write_bytes(content)

    def is_whole(self, folder: Path) -> bool:
        """Tell whether all of it is there, whatever else is, and however that came about."""
        return all(
            (folder / name).is_file() and _means((folder / name).read_bytes(), content, name)
            for name, content in self.files.items()
        )


@cache
def bank(which: int) -> tuple[Kind, tuple[Saved, ...]]:
    """Return a kind of run, and its checkpoints after each of ``STEPS``."""
    kind, world_size = BANK[which]
    saved = []
    with room() as root:
        for seed, step in enumerate(STEPS):
            run = Run(root, kind).go(seed + 1, {"a": [seed, 0.5, None], "t": torch.arange(3)})
            path = run.write(step, world_size=world_size, seed=which + seed)
            files = {file.name: file.read_bytes() for file in path.iterdir()}
            saved.append(Saved(step, files, run.everything()))
    return kind, tuple(saved)


@dataclass(frozen=True)
class Harm:
    """One thing that happens to one file, or to two, or to all of a folder.

    Attributes:
        how: the name of a function below.
        which: the file, and the other one, counted in the order of their names.
        where: the part of the file in front of it, in [0, 1).
        bits: what is changed, or put there.
    """

    how: str
    which: tuple[int, int]
    where: float
    bits: bytes

    def do(self, folder: Path, others: dict[str, bytes]) -> None:
        """Have it happen in ``folder``; ``others`` are files of another checkpoint."""
        files = sorted(folder.iterdir()) if folder.is_dir() else []
        if files:
            one, two = (files[index % len(files)] for index in self.which)
            HARMS[self.how](self, one, two, others)

    def spliced(self, file: Path, num_lost: int, more: bytes) -> None:
        """Put ``more`` in the place of some bytes."""
        if file.is_file():
            content = file.read_bytes()
            place = int(self.where * len(content))
            file.write_bytes(content[:place] + more + content[place + num_lost :])


def _flip(harm: Harm, one: Path, two: Path, others: dict[str, bytes]) -> None:
    if one.is_file() and (content := one.read_bytes()):
        byte = content[int(harm.where * len(content))]
        harm.spliced(one, 1, bytes([byte ^ (1 << harm.bits[0] % 8)]))


def _cut(harm: Harm, one: Path, two: Path, others: dict[str, bytes]) -> None:
    harm.spliced(one, 1 << 40, b"")


def _overwrite(harm: Harm, one: Path, two: Path, others: dict[str, bytes]) -> None:
    harm.spliced(one, len(harm.bits), harm.bits)


def _insert(harm: Harm, one: Path, two: Path, others: dict[str, bytes]) -> None:
    harm.spliced(one, 0, harm.bits)


def _lose(harm: Harm, one: Path, two: Path, others: dict[str, bytes]) -> None:
    harm.spliced(one, len(harm.bits), b"")


def _grow(harm: Harm, one: Path, two: Path, others: dict[str, bytes]) -> None:
    if one.is_file():
        one.write_bytes(one.read_bytes() + harm.bits)


def _blank(harm: Harm, one: Path, two: Path, others: dict[str, bytes]) -> None:
    if one.is_file():
        one.write_bytes(bytes(len(one.read_bytes())))


def _delete(harm: Harm, one: Path, two: Path, others: dict[str, bytes]) -> None:
    if one.is_dir() and not one.is_symlink():
        shutil.rmtree(one)
    else:
        one.unlink()


def _rename(harm: Harm, one: Path, two: Path, others: dict[str, bytes]) -> None:
    one.rename(one.with_name(f"{one.name}.bak"))


def _replace(harm: Harm, one: Path, two: Path, others: dict[str, bytes]) -> None:
    if one != two:
        _delete(harm, two, one, others)
        one.rename(two)


def _swap(harm: Harm, one: Path, two: Path, others: dict[str, bytes]) -> None:
    aside = _aside(one)
    if one != two and not os.path.lexists(aside):
        one.rename(aside)
        two.rename(one)
        aside.rename(two)


def _link(harm: Harm, one: Path, two: Path, others: dict[str, bytes]) -> None:
    """A link is as good as a file, if what it leads to is right: ``two`` seldom is."""
    aside = _aside(one)
    if not os.path.lexists(aside):
        one.rename(aside)
        one.symlink_to((aside, two, one, one.with_name("nowhere"))[harm.bits[0] % 4])


def _folder(harm: Harm, one: Path, two: Path, others: dict[str, bytes]) -> None:
    _delete(harm, one, two, others)
    one.mkdir()


def _pipe(harm: Harm, one: Path, two: Path, others: dict[str, bytes]) -> None:
    _delete(harm, one, two, others)
    os.mkfifo(one)


def _exchange(harm: Harm, one: Path, two: Path, others: dict[str, bytes]) -> None:
    """A file of another checkpoint, which has one of that name."""
    if one.is_file() and one.name in others:
        one.write_bytes(others[one.name])


def _empty(harm: Harm, one: Path, two: Path, others: dict[str, bytes]) -> None:
    shutil.rmtree(one.parent)
    one.parent.mkdir()


def _no_folder(harm: Harm, one: Path, two: Path, others: dict[str, bytes]) -> None:
    """Something else has the name of the folder."""
    folder = one.parent
    shutil.rmtree(folder)
    kind = harm.bits[0] % 3
    if kind == 0:
        folder.write_bytes(harm.bits)
    elif kind == 1:
        os.mkfifo(folder)
    else:
        folder.symlink_to(folder.with_name("nowhere"))


def _other_folder(harm: Harm, one: Path, two: Path, others: dict[str, bytes]) -> None:
    """All of another checkpoint under this one's name."""
    _empty(harm, one, two, others)
    for name, content in others.items():
        (one.parent / name).write_bytes(content)


HARMS = {
    "blank": _blank,
    "cut": _cut,
    "delete": _delete,
    "empty": _empty,
    "exchange": _exchange,
    "flip": _flip,
    "folder": _folder,
    "grow": _grow,
    "insert": _insert,
    "link": _link,
    "lose": _lose,
    "no folder": _no_folder,
    "other folder": _other_folder,
    "overwrite": _overwrite,
    "pipe": _pipe,
    "rename": _rename,
    "replace": _replace,
    "swap": _swap,
}
CHANGES = ("blank", "cut", "exchange", "flip", "grow", "insert", "lose", "overwrite")  # of bytes


def _harms(names: Iterable[str]) -> st.SearchStrategy[Harm]:
    return st.builds(
        Harm,
        how=st.sampled_from(sorted(names)),
        which=st.tuples(st.integers(0, 9), st.integers(0, 9)),
        where=st.floats(0, 1, exclude_max=True),
        bits=st.binary(min_size=1, max_size=40),
    )


harms, changes = _harms(HARMS), _harms(CHANGES)


def _aside(file: Path) -> Path:
    return file.with_name(f"{file.name}.aside")


def _means(content: bytes, written: bytes, name: str) -> bool:
    """Tell whether bytes are what was written; a manifest may be spaced as it likes."""
    if name != MANIFEST or content == written:
        return content == written
    try:
        return bool(json.loads(content) == json.loads(written))
    except ValueError:
        return False
