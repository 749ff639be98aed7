"""What one worker's profile measured, and its form on a disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, final

import numpy as np
from numpy.typing import NDArray

from .._types import FloatArray, IntArray
from ..exceptions import invalid

SCHEMA: Final = "evenstep.profile"
VERSION: Final = 1
FIELDS: Final = ("sizes", "seconds", "peak_bytes")


@final
@dataclass(frozen=True, slots=True, eq=False, init=False)
class Profile:
    """Times, and memory where known, of one worker at several batch sizes.

    Args:
        sizes: samples of each measurement, integers of at least 1, ascending, ``(num,)``. Repeats
            are welcome, and at least two sizes are needed: one says nothing of a curve.
        seconds: what it took, positive and finite, ``(num,)``.
        peak_bytes: the memory peak of each, integers of at least 0, ``(num,)``, with 0 where it
            is not known; None where none is.

    Attributes:
        sizes, seconds, peak_bytes: read-only arrays, copies of what was given.

    Raises:
        ValueError: an argument has another shape or type, is out of range or out of order.
    """

    sizes: IntArray
    seconds: FloatArray
    peak_bytes: IntArray | None

    def __init__(
        self,
        sizes: Sequence[int] | IntArray,
        seconds: Sequence[float] | FloatArray,
        peak_bytes: Sequence[int] | IntArray | None = None,
    ) -> None:
        counted, timed = _measured(sizes, seconds)
        peaks = None if peak_bytes is None else _peaks(peak_bytes, counted.shape)
        for name, value in zip(FIELDS, (counted, timed, peaks), strict=True):
            object.__setattr__(self, name, value)  # past the frozen guard, as a generated one goes

    def to_json(self) -> str:
        """Return the profile as one line of JSON, every float to its last bit.

        It is an object of ``"schema": "evenstep.profile"``, ``"version": 1`` and the three fields
        as lists, or null.
        """
        peaks = None if self.peak_bytes is None else self.peak_bytes.tolist()
        values = (self.sizes.tolist(), self.seconds.tolist(), peaks)
        record = {"schema": SCHEMA, "version": VERSION, **dict(zip(FIELDS, values, strict=True))}
        return json.dumps(record)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the profile that ``to_json`` wrote.

        Raises:
            ValueError: the text is no JSON, no profile, of a newer version, or its values are
                none that a profile may have.
        """
        record = read_record(text, owner="Profile", schema=SCHEMA, fields=FIELDS)
        return cls(**{name: record[name] for name in FIELDS})


def _measured(sizes: Any, seconds: Any) -> tuple[IntArray, FloatArray]:
    """Return one worker's measurements as read-only arrays of our own."""
    name = "Profile(sizes=...)"
    counted = _array(name, sizes, "iu", "be a list of integers")
    _refuse(name, counted, counted < 1, "be at least 1", "Leave idle workers out.")
    falls = np.diff(counted, prepend=counted[:1]) < 0
    remedy = "Sort: `order = np.argsort(sizes, kind='stable')`, for both arrays."
    _refuse(name, counted, falls, "be ascending", remedy)
    if len(np.unique(counted)) < 2:
        remedy = "Measure another, best at twice the first."
        raise invalid(name, "hold at least two sizes", np.unique(counted).tolist(), remedy)

    name = "Profile(seconds=...)"
    timed = _array(name, seconds, "iuf", "be a list of numbers")
    if timed.shape != counted.shape:
        rule = f"have the shape {counted.shape} of `sizes`"
        raise invalid(name, rule, timed.shape, "Give one time per size.")
    wrong = ~(np.isfinite(timed) & (timed > 0))
    remedy = "Leave out what failed, and synchronise the device before reading the clock."
    _refuse(name, timed, wrong, "be positive and finite", remedy)
    return _own(counted, np.int64), _own(timed, np.float64)


def _peaks(value: Any, shape: tuple[int, ...]) -> IntArray:
    name = "Profile(peak_bytes=...)"
    peaks = _array(name, value, "iu", "be a list of integers")
    if peaks.shape != shape:
        rule = f"have the shape {shape} of `sizes`"
        raise invalid(name, rule, peaks.shape, "Give one per size, 0 where it is not known.")
    _refuse(name, peaks, peaks < 0, "be at least 0", "Give 0 where it is not known.")
    return _own(peaks, np.int64)


def _array(name: str, value: Any, kinds: str, rule: str) -> NDArray[Any]:
    """Return ``value`` as an array of one dimension and one of the ``kinds`` of numpy."""
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError):
        array = np.empty((), object)  # ragged, say
    if array.ndim != 1 or not array.size or array.dtype.kind not in kinds:
        raise invalid(name, rule, repr(value)[:60], "Give one per measurement.")
    return array


def _own(value: NDArray[Any], dtype: type[Any]) -> NDArray[Any]:
    copy = value.astype(dtype)
    copy.flags.writeable = False
    return copy


def _refuse(
    name: str, value: NDArray[Any], wrong: NDArray[np.bool_], rule: str, remedy: str
) -> None:
    if wrong.any():
        at = int(np.argmax(wrong))
        raise invalid(name, rule, f"{value[at]} as measurement {at}", remedy)


def read_record(text: str, *, owner: str, schema: str, fields: Sequence[str]) -> dict[str, Any]:
    """Return the object in ``text``, its schema and names checked, its values not yet.

    Raises:
        ValueError: it is something else; the message names ``owner``.
    """
    name = f"{owner}.from_json(text=...)"
    remedy = f"Give what `{owner}.to_json` returned."
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(name, "be JSON", f"{text[:60]!r} ({error})", remedy) from error
    if not isinstance(record, dict) or record.get("schema") != schema:
        got = repr(record.get("schema") if isinstance(record, dict) else record)[:60]
        raise invalid(name, f'be an object of `"schema": "{schema}"`', got, remedy)
    version = record.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        rule = f"be of a version from 1 to {VERSION}"
        raise invalid(name, rule, repr(version)[:60], "Upgrade evenstep, or profile anew.")
    names = {"schema", "version", *fields}
    if record.keys() != names:
        got = f"{sorted(record.keys() ^ names)} missing or unknown"
        raise invalid(name, f"hold {sorted(names)} and nothing else", got, remedy)
    return record
