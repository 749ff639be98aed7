"""The cells of the fault matrix: who fails where and how, and which cells meet every pair."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import TypeVar

POINTS = (
    "prepare",  # one rank never comes to it
    "in prepare",  # in the data set, which `prepare` looks at
    "before the loop",
    *(f"step {number}" for number in range(5)),  # between forward and backward
    "buffers",  # before a forward in which DDP broadcasts the buffers of a BatchNorm
    "evaluation",
    "data set",  # in `__getitem__`
    "mean",
    "save",  # in `Checkpoint.save`, as it asks a part for its state
    "load",  # in `Checkpoint.load`, as it gives a part its state
    "barrier",
    "all_reduce",
    "end of run",
)
KINDS = ("kill", "stop", "raise", "hang")
RANKS = (0, 1, 2)
WRAPS = ("ddp", "fsdp2")

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Cell:
    """One run.

    Attributes:
        point: where in the script.
        kind: how: ``"kill"`` (SIGKILL), ``"stop"`` (SIGSTOP), ``"raise"`` an exception, or
            ``"hang"``, an endless loop in Python while the process lives.
        victim: the rank.
        wrap: ``"ddp"`` or ``"fsdp2"``.
        torchrun: whether torchrun starts the ranks, and ends the others by itself.
    """

    point: str
    kind: str
    victim: int
    wrap: str
    torchrun: bool = False

    def __str__(self) -> str:
        words = f"{self.kind} rank {self.victim} at {self.point}, {self.wrap}"
        return f"{words}, torchrun" if self.torchrun else words

    @property
    def victim_ends(self) -> bool:
        """Whether the victim has to end as well: not where it cannot, or nobody is left to see."""
        return self.kind != "stop" and (self.kind, self.point) != ("hang", "end of run")

    @property
    def file_name(self) -> str:
        """The cell as a name of a file."""
        return str(self).replace(",", "").replace(" ", "-")


def every() -> list[Cell]:
    """Return all cells."""
    return [Cell(*values) for values in product(POINTS, KINDS, RANKS, WRAPS)]


def covering() -> list[Cell]:
    """Return cells in which each value of an axis meets each value of every other."""
    return [Cell(*row) for row in pairwise(POINTS, KINDS, RANKS, WRAPS)]


def drawn(count: int, *, seed: int) -> list[Cell]:
    """Return cells that the covering set leaves out, drawn by ``seed``."""
    kept = set(covering())
    return random.Random(seed).sample([cell for cell in every() if cell not in kept], count)


def under_torchrun() -> list[Cell]:
    """Return a cell of each kind for torchrun."""
    return [
        Cell("save", "kill", 2, "fsdp2", torchrun=True),
        Cell("step 1", "stop", 1, "ddp", torchrun=True),
        Cell("data set", "raise", 0, "fsdp2", torchrun=True),
        Cell("buffers", "hang", 0, "ddp", torchrun=True),
    ]


def pairwise(*axes: Sequence[_T]) -> list[tuple[_T, ...]]:
    """Return rows with a value of each axis, in which any two values of two axes meet.

    Greedy: the next row is the one, of all there are, with the most pairs that are new, and of
    those the first whose pairs were taken least. So the rows at the beginning are as unlike as
    can be. Right for axes whose product can be listed; the number of rows is at least that of the
    two longest axes' product, and for the axes here equal to it.
    """
    rows = list(product(*axes))
    missing = {pair for row in rows for pair in _pairs(row)}
    taken: Counter[tuple[tuple[int, _T], ...]] = Counter()
    chosen = []

    def worth(row: tuple[_T, ...]) -> tuple[int, int]:
        return len(missing & _pairs(row)), -sum(taken[pair] for pair in _pairs(row))

    while missing:
        chosen.append(max(rows, key=worth))
        missing -= _pairs(chosen[-1])
        taken.update(_pairs(chosen[-1]))
    return chosen


def _pairs(row: tuple[_T, ...]) -> set[tuple[tuple[int, _T], ...]]:
    return set(combinations(enumerate(row), 2))
