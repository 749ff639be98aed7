"""Lines of a trace, or of a run's own events, read and checked one by one."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

from .._telemetry import Line
from .._telemetry._event_file import whole_lines
from .._telemetry._recorded import WARM_UP, Recorded
from ..exceptions import invalid

COLUMNS = ("step", "worker", "seconds", "samples")
_FIRST = 10  # lines that are looked at
_ONE_OBJECT = "Write one object with named columns per line."


@dataclass(frozen=True, slots=True)
class Row:
    """What one worker did in one step, and the line that says so, from 1."""

    line: int
    step: int
    worker: int
    seconds: float
    samples: int


def read_rows(file: Path) -> Iterator[Row]:
    """Yield the rows of a trace, in its order; of a run's events, those of the steps that count.

    Raises:
        ValueError: a line is no such row.
    """
    if is_run(file):
        yield from _of_run(Recorded.of(file, caller="read_trace"))
        return
    kinds = {".csv": _csv, ".jsonl": _json_lines}
    if file.suffix not in kinds:
        raise invalid(
            "read_trace(path=...)", "end in .csv or .jsonl", repr(str(file)), "Rename the file."
        )
    try:
        for line, entry in kinds[file.suffix](file):
            _check_columns(file, line, entry)
            yield Row(
                line,
                _whole(file, line, entry, "step", least=0),
                _whole(file, line, entry, "worker", least=0),
                _seconds(file, line, entry),
                _whole(file, line, entry, "samples", least=1),
            )
    except UnicodeDecodeError as error:
        raise invalid(
            "read_trace(path=...)", "be text in UTF-8", f"{file.name}: {error}", "Convert it."
        ) from error


def is_run(file: Path) -> bool:
    """Tell whether a file, or a folder, holds the events of a run; some lines may be damaged."""
    if file.is_dir():
        return True
    if file.suffix != ".jsonl":
        return False
    with file.open("rb") as lines:
        return any(_is_event(line) for line in islice(whole_lines(lines), _FIRST))


def _is_event(line: Line) -> bool:
    try:
        entry = json.loads(line or b"")
    except (ValueError, RecursionError):
        return False
    return isinstance(entry, dict) and "event" in entry


def _of_run(run: Recorded) -> Iterator[Row]:
    """Yield what workers did in full steps, numbered anew: the first warms up, as in training."""
    full = [
        (line, step.batch_size, step.compute_s)
        for line, step in run.steps[WARM_UP:]
        if sum(step.batch_size) == run.global_batch_size and all(step.batch_size)
    ]
    if not full:
        rule = f"hold a step of {run.global_batch_size} samples, some for each worker, after the"
        remedy = "Train for longer, or with `Bounds(min=1)`."
        raise invalid("read_trace(path=...)", f"{rule} first", f"none in {run.file}", remedy)
    for number, (line, sizes, seconds) in enumerate(full):
        for worker, (size, second) in enumerate(zip(sizes, seconds, strict=True)):
            yield Row(line, number, worker, second, size)


def refuse(file: Path, line: int, rule: str, got: object, remedy: str) -> NoReturn:
    """Raise the error for a line of a trace."""
    raise invalid("read_trace(path=...)", rule, f"{got} in line {line} of {file.name}", remedy)


def _csv(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines, strict=True)
        try:
            header = next(reader, [])
            _check_columns(file, 1, dict.fromkeys(header))
            if len(header) > len(COLUMNS):
                refuse(file, 1, "have each column once", ", ".join(header), "Drop one.")
            for cells in reader:
                if not cells:
                    continue
                if len(cells) != len(header):
                    rule = f"hold {len(header)} values in every row"
                    refuse(file, reader.line_num, rule, len(cells), "Fill in what is missing.")
                yield reader.line_num, dict(zip(header, cells, strict=True))
        except csv.Error as error:
            refuse(file, reader.line_num, "be CSV", f"{error}", "Quote nothing: all are numbers.")


def _json_lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with file.open(encoding="utf-8-sig") as lines:
        for number, text in enumerate(lines, start=1):
            if not text.strip():
                continue
            try:
                entry = json.loads(text)
            except (ValueError, RecursionError) as error:
                refuse(file, number, "hold JSON in every line", repr(str(error)), _ONE_OBJECT)
            if not isinstance(entry, dict):
                refuse(file, number, "hold JSON objects alone", text.strip(), _ONE_OBJECT)
            yield number, entry


def _check_columns(file: Path, line: int, entry: dict[str, Any]) -> None:
    rule = f"have the columns {', '.join(COLUMNS)} and no others"
    unknown = [name for name in entry if name not in COLUMNS]
    missing = [name for name in COLUMNS if name not in entry]
    if unknown:
        refuse(file, line, rule, f"{unknown[0]!r} as well", "Leave it out of the file.")
    if missing:
        refuse(file, line, rule, f"no {missing[0]!r}", "Record it for every worker and step.")


def _whole(file: Path, line: int, entry: dict[str, Any], name: str, *, least: int) -> int:
    value = entry[name]
    number = None
    if isinstance(value, str) and value.strip().lstrip("-").isdecimal():
        number = int(value)
    elif type(value) is int:
        number = value
    if number is None or number < least:
        remedy = "Leave out a worker that computed nothing." if least else "Count from 0."
        refuse(file, line, f"give {name!r} as an integer >= {least}", repr(value), remedy)
    return number


def _seconds(file: Path, line: int, entry: dict[str, Any]) -> float:
    value = entry["seconds"]
    try:
        seconds = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        remedy = "Leave out steps that were not measured."
        rule = "give 'seconds' as a positive, finite number"
        refuse(file, line, rule, repr(value), remedy)
    return seconds
