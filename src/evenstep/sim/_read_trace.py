"""Recorded runs as scenarios: their lines, read and checked one by one."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from .._telemetry._event_lines import WARM_UP, Recorded
from .._types import FloatArray
from ..exceptions import invalid
from ..prediction._affine_filter import AffineFilter
from ._scenario import Scenario

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
    """Return whether a file, or a folder, is that of a run."""
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


def read_trace(path: str | Path, *, intercept_s: float | FloatArray | None = None) -> Scenario:
    r"""Return the workers of a recorded run, to be asked what other plans would have cost.

    The ``events.jsonl`` of a run, or its folder: all full steps of the newest run in it that were
    measured, after the first, numbered anew, and named by the folder.

    Or a CSV with a header (``.csv``), with the columns ``step``, ``worker``, ``seconds`` and
    ``samples`` in any order and no others: what one worker computed in one step, and for how long,
    waiting apart. Steps ascend without a gap from any number on; the workers of a step come in any
    order. Worker numbers may be any, and their columns ascend.

    A worker without a row in a step was not there: ``presence`` is false, and a run over the
    trace restarts whenever a worker leaves or joins. A step that was not recorded for one of the
    workers alone has to be left out for all of them, with the steps numbered anew.

    One size a step says nothing of fixed costs. The times are taken to be
    $t_{kr}(b) = a_r + (\tau_{kr} - a_r) \, b / n_{kr}$, with $\tau$ and $n$ as recorded: exact at
    the recorded sizes, and the further off the more a step is fixed cost and $a$ is not given.
    All of it counts as foreseeable, noise included: there is no jitter, and an ``oracle`` knows.

    Args:
        path: of the file.
        intercept_s: fixed cost $a$ of a step, one number or one per worker, ``(world_size,)``, at
            least 0 and below every time recorded of that worker. None is 0 in a table; in a run,
            which has tried several sizes mostly, what ``AffineFilter`` makes of it, 90 % of that
            worker's shortest time at most.

    Raises:
        ValueError: the file is no such table, or is damaged; the message names the line.
        OSError: the file cannot be read.
    """
    file = Path(path)
    rows = list(read_rows(file))
    if not rows:
        refuse(file, 1, "hold at least one row", "none", "Record a step.")
    table = _Table.of(file, rows)
    if intercept_s is None:
        intercept_s = table.fitted_s() if is_run(file) else 0.0
    fixed_s = _intercept(intercept_s, len(table.workers))
    above = table.seconds > fixed_s
    if not (above | ~table.presence).all():
        step, worker = np.argwhere(table.presence & ~above)[0]
        got = f"{table.seconds[step, worker]} s, with `intercept_s` at {fixed_s[worker]}"
        remedy = "Lower `intercept_s`."
        refuse(file, int(table.line[step, worker]), "hold times above `intercept_s`", got, remedy)
    slope_s = (table.seconds - fixed_s) / table.samples
    # The times of absent workers are not used; something positive has to stand there.
    known = np.where(table.presence, slope_s, 0.0).sum(axis=0) / table.presence.sum(axis=0)
    slope_s = np.where(table.presence, slope_s, known)
    everybody = bool(table.presence.all())
    return Scenario(
        _name_of(file).encode("utf-8", "replace").decode(),  # a folder may be named by any bytes
        fixed_s,
        slope_s,
        np.ones_like(slope_s),
        presence=None if everybody else table.presence,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """Rows laid out by step and worker, all ``(num_steps, num_workers)``; 1 and 0 s if absent."""

    workers: list[int]
    seconds: FloatArray
    samples: FloatArray
    line: np.ndarray
    presence: np.ndarray

    @classmethod
    def of(cls, file: Path, rows: list[Row]) -> _Table:
        _check_steps(file, rows)
        workers = sorted({row.worker for row in rows})
        place = {worker: column for column, worker in enumerate(workers)}
        shape = (rows[-1].step - rows[0].step + 1, len(workers))
        table = cls(
            workers,
            np.zeros(shape),
            np.ones(shape),
            np.zeros(shape, np.int64),
            np.zeros(shape, np.bool_),
        )
        for row in rows:
            at = row.step - rows[0].step, place[row.worker]
            if table.presence[at]:
                got = f"worker {row.worker} in step {row.step}, as in line {table.line[at]}"
                remedy = "Add the two up, or drop one."
                refuse(file, row.line, "hold one row for each worker and step", got, remedy)
            table.seconds[at], table.samples[at] = row.seconds, row.samples
            table.line[at], table.presence[at] = row.line, True
        return table

    def fitted_s(self) -> FloatArray:
        """Return every worker's fixed cost as the sizes show it; all workers are always there."""
        estimator = AffineFilter()
        times = estimator.times(estimator.after(self.samples.astype(np.int64), self.seconds))
        assert times is not None
        fixed_s: FloatArray = np.minimum(times.intercept_s, 0.9 * self.seconds.min(axis=0))
        return fixed_s


def _name_of(file: Path) -> str:
    """Return what a recorded run is called: by its folder, or by its file."""
    if file.is_dir():
        return file.resolve().name
    return file.parent.name or file.stem if file.name == "events.jsonl" else file.stem


def _check_steps(file: Path, rows: Iterable[Row]) -> None:
    before: int | None = None
    for row in rows:
        if before is not None and row.step < before:
            got = f"step {row.step} after step {before}"
            refuse(file, row.line, "be sorted by step", got, "Sort the file.")
        if before is not None and row.step > before + 1:
            got = f"step {row.step} after step {before}"
            remedy = "Number the recorded steps one by one."
            refuse(file, row.line, "leave out no step", got, remedy)
        before = row.step


def _intercept(value: float | FloatArray, world_size: int) -> FloatArray:
    given = np.asarray(value, np.float64)
    if given.shape not in ((), (world_size,)) or not (np.isfinite(given) & (given >= 0)).all():
        raise invalid(
            "read_trace(intercept_s=...)",
            f"be one number >= 0, or {world_size} of them",
            value,
            "0 takes every time to grow with the batch from the start.",
        )
    return np.broadcast_to(given, (world_size,)).copy()
