"""Steps and accounts as rows of text, of which many together become arrays."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

import numpy as np

from .._types import FloatArray, IntArray
from ..events import StepMeasured, StepsAccounted, to_record
from ._decimals import decimals

PARTS = tuple(field.name for field in fields(StepsAccounted)[3:])
"""The parts of a step, in the order of ``StepsAccounted``."""

_MEASURED = b'{"event": "StepMeasured", '
_ACCOUNTED = b'{"event": "StepsAccounted", '
_SIZES = b', "batch_size": ['
_TIMES = tuple(b', "%s": [' % name for name in (b"compute_s", b"data_s", b"idle_s"))
_WALL = b', "wall_s": ['
_SPENT = tuple(b', "%s": [' % name.encode() for name in PARTS)
_LARGEST = 2.0**53


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredRow:
    """One ``StepMeasured``, whose times are still text.

    Attributes:
        line: where it stands in the file, from 1.
        step, num_steps: of the event.
        batch_size: ``(world_size,)``.
        lists: ``compute_s`` alone, comma-separated.
        rest: the fields behind the lists.
    """

    line: int
    step: int
    num_steps: int
    batch_size: IntArray
    lists: tuple[bytes]
    rest: dict[str, Any]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.batch_size)


@dataclass(frozen=True, slots=True)
class AccountedRow:
    """One ``StepsAccounted``, whose times are still text.

    Attributes:
        line: where it stands in the file, from 1.
        step, num_steps: of the event.
        world_size: number of ranks.
        lists: every part, comma-separated; they add up to ``wall_s``.
    """

    line: int
    step: int
    num_steps: int
    world_size: int
    lists: tuple[bytes, ...]


AnyRow = TypeVar("AnyRow", MeasuredRow, AccountedRow)


@dataclass(frozen=True, slots=True, eq=False)
class RowBlock(Generic[AnyRow]):
    """Rows of as many ranks each, with what their text says.

    Attributes:
        rows: those whose times can be, in order.
        times_s: their times, ``(len(rows), lists, world_size)``.
    """

    rows: tuple[AnyRow, ...]
    times_s: FloatArray


class RowReader:
    """Finds the lists in lines of the layout that ``JsonLines`` writes, without parsing them.

    Of ``StepMeasured``, ``data_s`` and ``idle_s`` are passed over: accounts say the one, and the
    other follows from ``compute_s``.
    """

    def __init__(self) -> None:
        self._sizes_text, self._sizes = b"", np.zeros(0, np.int64)  # they seldom change

    def read(self, line: bytes, number: int) -> MeasuredRow | AccountedRow | None:
        """Return the row; None for a line of another kind or layout.

        Args:
            line: without its end.
            number: of the line, from 1.
        """
        try:
            if line.startswith(_MEASURED):
                return self._measured(line, number)
            return self._accounted(line, number) if line.startswith(_ACCOUNTED) else None
        except (ValueError, KeyError, TypeError):
            return None  # another reader says what is wrong with it

    def again(
        self, event: StepMeasured | StepsAccounted, number: int
    ) -> MeasuredRow | AccountedRow:
        """Return the row of an event that another reader has found in a line."""
        row = self.read(json.dumps(to_record(event)).encode(), number)
        if row is None:
            raise ValueError(f"`{type(event).__name__}` has lists of different lengths")
        return row

    def _measured(self, line: bytes, number: int) -> MeasuredRow | None:
        head, *lists, rest = line.split(b"]")
        start, sizes = _split_at(head, _SIZES)
        texts = _after(lists, _TIMES)
        if texts is None:
            return None
        if sizes != self._sizes_text:
            self._sizes = np.array([_count(size) for size in json.loads(b"[" + sizes + b"]")])
            self._sizes.flags.writeable = False
            self._sizes_text = sizes
        if texts[0].count(b",") + 1 != len(self._sizes):
            return None
        numbers = json.loads((start + rest).decode())  # decoded: it need not find out from what
        step, num_steps = _count(numbers["step"]), _count(numbers.get("num_steps", 1))
        if num_steps < 1:
            return None
        return MeasuredRow(number, step, num_steps, self._sizes, (texts[0],), numbers)

    def _accounted(self, line: bytes, number: int) -> AccountedRow | None:
        head, *lists, end = line.split(b"]")
        start, wall = _split_at(head, _WALL)
        texts = _after(lists, _SPENT)
        num_ranks = wall.count(b",") + 1
        num_commas = (1 + len(PARTS)) * num_ranks + 2  # in every list and behind it, and in front
        if texts is None or end != b"}" or line.count(b",") != num_commas:
            return None
        known = json.loads((start + end).decode())
        step, num_steps = _count(known["step"]), _count(known["num_steps"])
        if num_steps < 1:
            return None
        return AccountedRow(number, step, num_steps, num_ranks, tuple(texts))


def block_of(rows: Sequence[AnyRow], reject: Callable[[int, str], None]) -> RowBlock[AnyRow]:
    """Return what ``rows`` say; one whose times cannot be is left out.

    Args:
        rows: all of as many ranks.
        reject: called with the line of a row that is left out, and why.
    """
    times_s, kept = _times(rows), tuple(rows)
    if times_s is None:
        each = [(row, _times([row])) for row in rows]
        kept = tuple(row for row, found in each if found is not None)
        for row, found in each:
            if found is None:
                reject(row.line, "a time that is no number, or one too many")
        times_s = np.concatenate([found for _, found in each if found is not None] or [_none()])
    can_be = (times_s >= 0) & (times_s < _LARGEST)
    is_good = [bool(each.all()) for each in can_be]
    for row, is_kept in zip(kept, is_good, strict=True):
        if not is_kept:
            reject(row.line, "times that are no finite numbers of at least 0")
    good = tuple(row for row, is_kept in zip(kept, is_good, strict=True) if is_kept)
    return RowBlock(good, times_s[is_good])


def _none() -> FloatArray:
    return np.zeros((0, 1, 1))


def _times(rows: Sequence[AnyRow]) -> FloatArray | None:
    """Return the times of all rows, ``(rows, lists, world_size)``; None if one is no number."""
    world_size = rows[0].world_size
    times_s = np.zeros((len(rows), len(rows[0].lists), world_size))
    nothing = b", ".join([b"0.0"] * world_size)  # as of checkpoints in most steps
    for at in range(times_s.shape[1]):
        texts = [(index, row.lists[at]) for index, row in enumerate(rows)]
        told = [(index, text) for index, text in texts if text != nothing]
        if told:
            try:
                numbers = decimals(b", ".join([text for _, text in told]))
                times_s[[index for index, _ in told], at] = numbers.reshape(-1, world_size)
            except ValueError:  # no number, or another number of them than there are ranks
                return None
    return times_s


def _split_at(head: bytes, mark: bytes) -> tuple[bytes, bytes]:
    start, found, numbers = head.partition(mark)
    if not found:
        raise ValueError("another layout")
    return start, numbers


def _after(lists: Sequence[bytes], marks: Sequence[bytes]) -> list[bytes] | None:
    """Return the insides of lists of those names; None if they are others."""
    if len(lists) != len(marks) or not all(map(bytes.startswith, lists, marks)):
        return None
    return [text[len(mark) :] for text, mark in zip(lists, marks, strict=True)]


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise ValueError("no count")
    return value
