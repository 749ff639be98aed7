"""A run's file of events in, its figures out, in memory that does not grow with the run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import final

import numpy as np

from .._telemetry import EventFile
from ..events import (
    EstimatesRestored,
    Event,
    ExchangeMeasured,
    LinksMeasured,
    Rebalanced,
    RunEnded,
    RunStarted,
    SharesPlanned,
    StepMeasured,
    StepsAccounted,
    WaitingDiagnosed,
)
from ..exceptions import invalid
from ._cause_tally import CauseTally
from ._link_tally import LinkTally
from ._mishaps import Mishaps
from ._plan_changes import PlanChanges
from ._run_figures import ReportFigures
from ._step_bins import StepBins
from ._step_tally import AccountTally, StepTally

_BLOCK_NUMBERS = 1 << 14  # of ranks in all events that are added up together


def read_figures(path: str | Path) -> ReportFigures:
    """Return what a recorded run comes to.

    All starts in the file count. Where a later one has other ranks, each rank is shown as one,
    under the name that it had last.

    Args:
        path: a run's folder, as given to ``Runtime(run_dir=...)``, or its ``events.jsonl``.

    Raises:
        ValueError: the file holds no measured step, or was written by a newer evenstep.
        OSError: the file cannot be read.
    """
    events = EventFile(path, check=_check)
    reading = _Reading(events.path)
    for _, event in events:
        reading.add(event)
    return reading.figures(str(events.left_out))


@final
class _Reading:
    """Takes in one event after the other."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._measured: list[StepMeasured] = []
        self._accounted: list[StepsAccounted] = []
        bins = self._bins = StepBins()
        self._steps, self._accounts = StepTally(bins), AccountTally(bins)
        self._links = LinkTally(bins)
        self._changes, self._causes, self._mishaps = PlanChanges(bins), CauseTally(), Mishaps()
        self._start: RunStarted | None = None
        self._num_starts = self._world_size = self._largest = 0
        self._step = -1  # the newest that was measured
        self._is_ended, self._keeps_equal = False, True

    def figures(self, left_out: str) -> ReportFigures:
        """Return the figures, after the last event.

        Raises:
            ValueError: no step was measured.
        """
        self._flush()
        if not self._steps.num_steps:
            remedy = "Train with `Runtime(run_dir=...)`, a few steps are enough."
            got = f"none in {self._file}"
            raise invalid("read_figures(path=...)", "hold a measured step", got, remedy)
        steps, accounts, bins = self._steps, self._accounts, self._bins
        first = bins.first or 0
        num = int((steps.last_step - first) // bins.width) + 1
        return ReportFigures(
            name=_name_of(self._file),
            start=self._start,
            num_starts=self._num_starts,
            is_ended=self._is_ended,
            keeps_equal=self._keeps_equal,
            world_size=self._largest,
            num_steps=steps.num_steps,
            first_step=first,
            last_step=steps.last_step,
            edges=first + bins.width * np.arange(num),
            width=bins.width,
            steps=steps.figures(num, self._largest),
            accounts=accounts.figures(num, self._largest) if accounts.num_steps else None,
            savings=steps.savings(),
            diagnosed=self._causes.result(self._step),
            changes=self._changes.largest(),
            num_changes=self._changes.num,
            changes_by_stretch=self._changes.by_stretch(num),
            mishaps=self._mishaps.all(),
            links=self._links.figures(num),
            left_out=left_out,
        )

    def _add_steps(self, event: StepMeasured | StepsAccounted) -> None:
        num_ranks = len(event.batch_size if isinstance(event, StepMeasured) else event.wall_s)
        if num_ranks != self._world_size:
            self._flush()
            self._world_size = num_ranks
            self._largest = max(self._largest, num_ranks)
        self._bins.begin(max(event.step - event.num_steps + 1, 0))
        if isinstance(event, StepMeasured):
            self._measured.append(event)
            self._step = event.step
            self._keeps_equal &= self._start is not None and self._start.keeps_equal
        else:
            self._accounted.append(event)
        if max(len(self._measured), len(self._accounted)) * num_ranks >= _BLOCK_NUMBERS:
            self._flush()

    def _flush(self) -> None:
        """Add up the steps that are waiting."""
        self._steps.add(self._measured)
        self._accounts.add(self._accounted)
        self._measured, self._accounted = [], []

    def add(self, event: Event) -> None:
        """Take in the next event."""
        if isinstance(event, (StepMeasured, StepsAccounted)):
            self._add_steps(event)
            return
        is_first = isinstance(event, RunStarted) and self._num_starts == 0 and self._step < 0
        self._mishaps.add(event, self._step, is_first=is_first)
        match event:
            case RunStarted():
                self._flush()
                self._start, self._is_ended = event, False
                self._num_starts += 1
                self._changes.begin(None)
                self._causes.begin(self._step)
                self._world_size = event.world_size
                self._largest = max(self._largest, event.world_size)
            case EstimatesRestored():
                self._changes.begin(event.batch_size)
            case RunEnded():
                self._is_ended = True
            case Rebalanced():
                self._changes.add(event)
            case WaitingDiagnosed():
                self._causes.add(event)
            case LinksMeasured() | SharesPlanned() | ExchangeMeasured():
                self._links.add(event)


def _check(event: Event) -> None:
    """Raise ValueError for a step that no run counts."""
    if isinstance(event, (StepMeasured, StepsAccounted)) and event.step < 0:
        raise ValueError(f"`{type(event).__name__}(step=...)` must be at least 0, got {event.step}")


def _name_of(file: Path) -> str:
    """Return the name of a run: its folder's, or the file's where that is called otherwise."""
    name = file.absolute().parent.name if file.name == "events.jsonl" else file.stem
    return os.fsencode(name).decode("utf-8", "replace")  # of any bytes, and a page is text
