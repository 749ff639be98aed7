"""Recorded runs as scenarios."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .._types import FloatArray
from ..exceptions import invalid
from ..prediction._affine_filter import AffineFilter
from ._rows import Row, is_run, read_rows, refuse
from ._scenario import Scenario


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
