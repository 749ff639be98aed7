"""Traces as CSV: what changes on which host when."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from .._whole_file import write_whole
from ..exceptions import invalid
from ._trace import Change, Trace

NEEDED = ("seconds", "host", "mbit")
COLUMNS = (*NEEDED, "cpus")


def read_trace(path: str | Path) -> Trace:
    """Return the trace of a CSV file with the columns ``seconds,host,mbit`` and perhaps ``cpus``.

    Seconds count from the beginning and ascend; hosts count from 0. ``mbit`` is one number for both
    ways, or ``up:down``. An empty cell leaves that part of the host as it is.

        seconds,host,mbit,cpus
        0,0,200,0.8
        0,1,100:50,
        30,0,,0.4

    Raises:
        ValueError: the file is no such table; the message names the line.
        OSError: the file cannot be read.
    """
    file = Path(path)
    changes: list[Change] = []
    try:
        for line, cells in _rows(file):
            change = _change(file, line, cells)
            if changes and change.at_s < changes[-1].at_s:
                got = f"{change.at_s:g} s after {changes[-1].at_s:g} s"
                _refuse(file, line, "be sorted by seconds", got, "Sort the file.")
            changes.append(change)
    except UnicodeDecodeError as error:
        got = f"{file.name}: {error}"
        raise invalid("read_trace(path=...)", "be text in UTF-8", got, "Convert it.") from error
    if not changes:
        _refuse(file, 1, "hold at least one row", "none", "Write a change.")
    return Trace(changes)


def write_trace(trace: Trace, path: str | Path) -> None:
    """Write what ``read_trace`` reads; a file in the way is replaced, whole or not at all."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for change in trace.changes:
        rate = "" if change.mbit is None else ":".join(map(repr, change.mbit))
        quota = "" if change.cpus is None else repr(change.cpus)
        writer.writerow((repr(change.at_s), change.host, rate, quota))
    write_whole(Path(path), [text.getvalue()])


def parse_mbit(text: str) -> float | tuple[float, float]:
    """Return the rate written as ``200`` or, up and down, ``200:50``.

    Raises:
        ValueError: it is neither.
    """
    numbers = [float(part) for part in text.split(":")]
    if len(numbers) == 1:
        return numbers[0]
    up, down = numbers
    return up, down


def _rows(file: Path) -> Iterator[tuple[int, dict[str, str]]]:
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines, strict=True)
        try:
            header = [name.strip() for name in next(reader, [])]
            _check_header(file, header)
            for cells in reader:
                if not cells:
                    continue
                if len(cells) != len(header):
                    rule = f"hold {len(header)} values in every row"
                    _refuse(file, reader.line_num, rule, len(cells), "Leave a cell empty instead.")
                yield reader.line_num, dict(zip(header, map(str.strip, cells), strict=True))
        except csv.Error as error:
            _refuse(file, reader.line_num, "be CSV", f"{error}", "Quote nothing.")


def _check_header(file: Path, header: list[str]) -> None:
    known = set(header) <= set(COLUMNS) and set(NEEDED) <= set(header)
    if not known or len(set(header)) < len(header):
        rule = f"have the columns {','.join(NEEDED)} and perhaps cpus, each once"
        got = ",".join(header) or "nothing"
        _refuse(file, 1, rule, got, "Write them in the first line.")


def _change(file: Path, line: int, cells: dict[str, str]) -> Change:
    """Return the change that a row tells; what its fields refuse is refused with the line."""
    host, rate, quota = cells["host"], cells["mbit"], cells.get("cpus", "")
    if not host.isdecimal():
        _refuse(file, line, "give 'host' as a whole number from 0", repr(host), "Count the hosts.")
    try:
        seconds = float(cells["seconds"])
        mbit = parse_mbit(rate) if rate else None
        cpus = float(quota) if quota else None
    except ValueError:
        got = ",".join(cells.values())
        _refuse(file, line, "hold numbers, and `up:down` in 'mbit'", got, "Leave out units.")
    try:
        return Change(seconds, int(host), mbit=mbit, cpus=cpus)
    except ValueError as error:
        raise ValueError(f"Line {line} of {file.name}: {error}") from error


def _refuse(file: Path, line: int, rule: str, got: object, remedy: str) -> NoReturn:
    raise invalid("read_trace(path=...)", rule, f"{got} in line {line} of {file.name}", remedy)
