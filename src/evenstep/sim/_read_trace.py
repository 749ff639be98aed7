"""Recorded runs as scenarios: their lines, read and checked one by one."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, NoReturn

import numpy as np
from msgspec import Meta, Struct, ValidationError, convert

from .._telemetry._event_lines import WARM_UP, Recorded, run_name
from .._types import FloatArray
from ..events import Count, Positive
from ..exceptions import invalid
from ..prediction._affine_filter import AffineFilter
from ._scenarios import Scenario

Row = tuple[int, int, int, float, int]
"""A line, from 1, and what it says: step, worker, seconds, samples."""


class _Row(Struct):
    """What stands in a row of a table."""

    step: Count
    worker: Count
    seconds: Annotated[float, Meta(gt=0, lt=1e18)]
    samples: Positive


COLUMNS = _Row.__struct_fields__


def _read_rows(file: Path) -> Iterator[Row]:
    """Yield the rows of a trace, in its order; of a run's events, those of the steps that count.

    Raises:
        ValueError: a line is no such row.
    """
    if _is_run(file):
        yield from _of_run(Recorded.of(file, caller="read_trace"))
        return
    if file.suffix != ".csv":
        rule, remedy = "end in .csv, or hold a run's events", "Rename the file."
        raise invalid("read_trace(path=...)", rule, repr(str(file)), remedy)
    try:
        for line, entry in _csv(file):
            try:
                row = convert(entry, _Row, strict=False)
            except ValidationError as error:
                rule = "count from 0, `samples` from 1, with `seconds` above 0"
                remedy = "Leave out a worker that computed nothing, and steps not measured."
                _refuse(file, line, rule, error, remedy)
            yield line, row.step, row.worker, row.seconds, row.samples
    except UnicodeDecodeError as error:
        raise invalid(
            "read_trace(path=...)", "be text in UTF-8", f"{file.name}: {error}", "Convert it."
        ) from error


def _is_run(file: Path) -> bool:
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
            yield line, number, worker, second, size


def _refuse(file: Path, line: int, rule: str, got: object, remedy: str) -> NoReturn:
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
                _refuse(file, 1, rule, got, "Record them for every worker and step.")
            for cells in filter(None, reader):
                if len(cells) != len(header):
                    rule = f"hold {len(header)} values in every row"
                    _refuse(file, reader.line_num, rule, len(cells), "Fill in what is missing.")
                yield reader.line_num, dict(zip(header, map(str.strip, cells), strict=True))
        except csv.Error as error:
            _refuse(file, reader.line_num, "be CSV", f"{error}", "Quote nothing: all are numbers.")


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
    return TraceTable(Path(path)).scenario(intercept_s)


class TraceTable:
    """The rows of a trace laid out by step and worker.

    Args:
        file: of the trace.

    Attributes:
        presence: which workers are there, ``(num_steps, num_workers)``.
        seconds, samples: what they did, likewise; 0 s and one sample of those who are absent.

    Raises:
        ValueError: the file is no such table, or is damaged; the message names the line.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        rows = list(_read_rows(file))
        if not rows:
            _refuse(file, 1, "hold at least one row", "none", "Record a step.")
        _check_steps(file, rows)
        first_step, last_step = rows[0][1], rows[-1][1]
        workers = sorted({worker for _, _, worker, _, _ in rows})
        place = {worker: column for column, worker in enumerate(workers)}
        shape = (last_step - first_step + 1, len(workers))
        self.seconds, self.samples = np.zeros(shape), np.ones(shape)
        self.presence, self._line = np.zeros(shape, np.bool_), np.zeros(shape, np.int64)
        for line, step, worker, seconds, samples in rows:
            at = step - first_step, place[worker]
            if self.presence[at]:
                got = f"worker {worker} in step {step}, as in line {self._line[at]}"
                remedy = "Add the two up, or drop one."
                _refuse(file, line, "hold one row for each worker and step", got, remedy)
            self.seconds[at], self.samples[at] = seconds, samples
            self._line[at], self.presence[at] = line, True

    def scenario(self, intercept_s: float | FloatArray | None) -> Scenario:
        """Return its workers; ``read_trace`` says what an intercept of None is."""
        presence, seconds = self.presence, self.seconds
        if intercept_s is None:
            intercept_s = self._fitted_s() if _is_run(self._file) else 0.0
        fixed_s = _intercept(intercept_s, presence.shape[1])
        above = seconds > fixed_s
        if not (above | ~presence).all():
            at = step, worker = tuple(np.argwhere(presence & ~above)[0])
            got = f"{seconds[step, worker]} s, with `intercept_s` at {fixed_s[worker]}"
            rule, remedy = "hold times above `intercept_s`", "Lower `intercept_s`."
            _refuse(self._file, int(self._line[at]), rule, got, remedy)
        slope_s = (seconds - fixed_s) / self.samples
        # The times of absent workers are not used; something positive has to stand there.
        known = np.where(presence, slope_s, 0.0).sum(axis=0) / presence.sum(axis=0)
        slope_s = np.where(presence, slope_s, known)
        return Scenario(
            run_name(self._file),
            fixed_s,
            slope_s,
            np.ones_like(slope_s),
            presence=None if presence.all() else presence,
        )

    def _fitted_s(self) -> FloatArray:
        """Return every worker's fixed cost as the sizes show it; all workers are always there."""
        estimator = AffineFilter()
        times = estimator.times(estimator.after(self.samples.astype(np.int64), self.seconds))
        assert times is not None
        fixed_s: FloatArray = np.minimum(times.intercept_s, 0.9 * self.seconds.min(axis=0))
        return fixed_s


def _check_steps(file: Path, rows: Sequence[Row]) -> None:
    for (_, before, *_), (line, step, *_) in pairwise(rows):
        got = f"step {step} after step {before}"
        if step < before:
            _refuse(file, line, "be sorted by step", got, "Sort the file.")
        if step > before + 1:
            remedy = "Number the recorded steps one by one."
            _refuse(file, line, "leave out no step", got, remedy)


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
