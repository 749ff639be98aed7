"""Lines of a trace, or of a run's own events, read and checked one by one."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from .._telemetry._recorded import WARM_UP, Recorded
from ..exceptions import invalid

COLUMNS = ("step", "worker", "seconds", "samples")


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
    if file.suffix != ".csv":
        rule, remedy = "end in .csv, or hold a run's events", "Rename the file."
        raise invalid("read_trace(path=...)", rule, repr(str(file)), remedy)
    try:
        for line, entry in _csv(file):
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
    """Tell whether a file, or a folder, is that of a run."""
    return file.is_dir() or file.suffix == ".jsonl"


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


def _csv(file: Path) -> Iterator[tuple[int, dict[str, str]]]:
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines, strict=True)
        try:
            header = next(reader, [])
            if sorted(header) != sorted(COLUMNS):
                rule = f"have the columns {', '.join(COLUMNS)}, each once and no others"
                got = ", ".join(header) or "none"
                refuse(file, 1, rule, got, "Record them for every worker and step.")
            for cells in filter(None, reader):
                if len(cells) != len(header):
                    rule = f"hold {len(header)} values in every row"
                    refuse(file, reader.line_num, rule, len(cells), "Fill in what is missing.")
                yield reader.line_num, dict(zip(header, cells, strict=True))
        except csv.Error as error:
            refuse(file, reader.line_num, "be CSV", f"{error}", "Quote nothing: all are numbers.")


def _whole(file: Path, line: int, entry: dict[str, str], name: str, *, least: int) -> int:
    value = entry[name]
    number = int(value) if value.strip().lstrip("-").isdecimal() else None
    if number is None or number < least:
        remedy = "Leave out a worker that computed nothing." if least else "Count from 0."
        refuse(file, line, f"give {name!r} as an integer >= {least}", repr(value), remedy)
    return number


def _seconds(file: Path, line: int, entry: dict[str, str]) -> float:
    value = entry["seconds"]
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        remedy = "Leave out steps that were not measured."
        rule = "give 'seconds' as a positive, finite number"
        refuse(file, line, rule, repr(value), remedy)
    return seconds
