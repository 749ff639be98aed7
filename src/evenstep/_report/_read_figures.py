"""A run's file of events in, its figures out, in memory that does not grow with the run."""

from __future__ import annotations

import heapq
import os
import re
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import final

import numpy as np

from .._telemetry import EventFile
from .._telemetry._line import happened
from .._types import IntArray
from ..events import (
    BalancingStopped,
    ClaimsSwitched,
    EstimatesRestored,
    Event,
    ExchangeMeasured,
    LinksMeasured,
    LossNotFinite,
    MeasurementRejected,
    MemoryCapped,
    PolicyFailed,
    PolicySlow,
    Rebalanced,
    RunEnded,
    RunStarted,
    SharesPlanned,
    SizesHeld,
    StepMeasured,
    StepsAccounted,
    WaitingDiagnosed,
    WorkerLost,
    WorkerUnhelpful,
)
from ..exceptions import invalid
from ._run_figures import Diagnosed, KnownCause, LinkFigures, Mishap, PlanChange, ReportFigures
from ._step_tally import AccountTally, StepBins, StepTally, over

_MOST_CAUSES = 1000  # causes are text, and a damaged file can have any number of them
_NEARLY_ALL = 0.9  # of a start's steps: the first ones and those after a gap are left out


@final
class CauseTally:
    """Adds up what each cause cost on each rank.

    Diagnoses overlap: each is about the newest minute, and the last one of a start about all of it.
    So one on nearly all steps of a start stands in place of those before it, and of another one
    only the steps count that were not counted for this cause.

    Some runs report a diagnosis only if it names other causes than the one before. So the newest
    one holds until the steps that the next one is about.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], KnownCause] = {}
        self._of_start: dict[tuple[str, int], tuple[float, int]] = {}  # seconds, until which step
        self._holding: dict[tuple[str, int], float] = {}  # seconds a step, by the newest diagnosis
        self._first = self._newest = -1  # of the steps that diagnoses of this start are about
        self._num = self._num_without = 0
        self._explained = 0.0
        self._no_verdict = ""

    def begin(self, step: int) -> None:
        """Have what comes be of a new start, which has steps of its own.

        Args:
            step: the newest one of the start before.
        """
        self._hold(step)
        self._of_start, self._holding, self._first, self._newest = {}, {}, -1, -1

    def add(self, event: WaitingDiagnosed) -> None:
        """Take in the next diagnosis."""
        before_first = event.step - event.num_steps
        if self._newest < 0 or event.step < self._newest:
            self.begin(event.step)
            self._first = before_first
        self._newest = event.step
        is_of_all = event.num_steps >= _NEARLY_ALL * (event.step - self._first)
        if not is_of_all:
            self._hold(before_first)
        self._holding = {}
        self._num += 1
        if event.no_verdict:
            self._num_without += 1
            self._no_verdict = event.no_verdict
            return
        self._explained += event.explained_share
        found = (event.causes, event.ranks, event.lost_share, event.evidence, event.remedy)
        for cause, rank, lost_share, evidence, remedy in zip(*found, strict=False):
            before = self._known.get((cause, rank))
            if before is None and len(self._known) >= _MOST_CAUSES:
                continue
            known_s, until = self._of_start.get((cause, rank), (0.0, before_first))
            num_new = event.num_steps if is_of_all else min(event.num_steps, event.step - until)
            more_s = lost_share * event.step_s * num_new - (known_s if is_of_all else 0.0)
            self._of_start[cause, rank] = known_s + more_s, event.step
            self._holding[cause, rank] = lost_share * event.step_s
            lost_s, num = (before.lost_s, before.num) if before else (0.0, 0)
            self._known[cause, rank] = KnownCause(
                cause, rank, lost_s + more_s, num + 1, event.step, evidence, remedy
            )

    def result(self, step: int) -> Diagnosed | None:
        """Return all of it, up to the newest step; None without a diagnosis."""
        if not self._num:
            return None
        self._hold(step)
        num_with = self._num - self._num_without
        return Diagnosed(
            causes=tuple(sorted(self._known.values(), key=lambda one: (-one.lost_s, one.rank))),
            num=self._num,
            explained_share=self._explained / num_with if num_with else None,
            no_verdict=self._no_verdict,
            num_without=self._num_without,
        )

    def _hold(self, step: int) -> None:
        """Have the causes of the newest diagnosis cost as much in all steps up to this one."""
        for key, each_s in self._holding.items():
            known_s, until = self._of_start[key]
            more_s = each_s * max(0, step - until)
            self._of_start[key] = known_s + more_s, max(until, step)
            self._known[key] = replace(self._known[key], lost_s=self._known[key].lost_s + more_s)


MOST_SHARES = 30


@final
class LinkTally:
    """Adds up events on links."""

    def __init__(self, bins: StepBins) -> None:
        self._bins = bins
        self._first: LinksMeasured | None = None
        self._last: LinksMeasured | None = None
        self._num_measured = self._num_shares = self._num_exchanges = 0
        self._shares: deque[SharesPlanned] = deque(maxlen=MOST_SHARES)
        self._sums = bins.sums()  # exchanges, their number, predictions, their number
        self._range = bins.range()

    def add(self, event: LinksMeasured | SharesPlanned | ExchangeMeasured) -> None:
        """Take in the next event."""
        if isinstance(event, LinksMeasured):
            self._first, self._last = self._first or event, event
            self._num_measured += 1
        elif isinstance(event, SharesPlanned):
            self._shares.append(event)
            self._num_shares += 1
        else:
            at = self._bins.at(np.array([event.step], np.int64))
            predicted_s = event.predicted_s
            row = [event.exchange_s, 1, predicted_s or 0.0, predicted_s is not None]
            self._sums.add(at, np.array([row], np.float64))
            self._range.add(at, np.array([event.exchange_s]))
            self._num_exchanges += 1

    def figures(self, num_stretches: int) -> LinkFigures | None:
        """Return all of it, by so many stretches; None where nothing was reported."""
        if not (self._num_measured or self._num_shares or self._num_exchanges):
            return None
        sums = self._sums.values[:num_stretches]
        if not sums.size:
            sums = np.zeros((num_stretches, 4))
        return LinkFigures(
            first=self._first,
            last=self._last,
            num_measured=self._num_measured,
            shares=tuple(self._shares),
            num_shares=self._num_shares,
            exchange_s=over(sums[:, 0], sums[:, 1]),
            predicted_s=over(sums[:, 2], sums[:, 3]),
            least_s=self._range.least[:num_stretches],
            most_s=self._range.most[:num_stretches],
        )


_MOST = 400
_MOST_CHARACTERS = 2000

_RARE = (WorkerLost, BalancingStopped, LossNotFinite, ClaimsSwitched)
_OFTEN = (MeasurementRejected, PolicyFailed, PolicySlow, MemoryCapped, SizesHeld, WorkerUnhelpful)
"""Reported once for each rank, with their number: one that fails does so at every step."""


@final
class Mishaps:
    """Collects them: the newest of each kind on each rank where a kind comes often."""

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], Mishap] = {}
        self._step = -1
        self.num_more = 0

    def add(self, event: Event, step: int, *, is_first: bool = False) -> None:
        """Take in an event of any kind.

        Args:
            event: what happened.
            step: the newest one that was measured: when it happened, if it does not say so.
            is_first: whether it is the first start of the run, and so no mishap.
        """
        self._step = getattr(event, "step", step)
        words = _words(event)
        if not words or is_first:
            return
        kind, rank = type(event).__name__, getattr(event, "rank", None)
        is_often = isinstance(event, _OFTEN)
        key = (kind, rank) if is_often else (kind, rank, len(self._found))
        before = self._found.get(key)
        if before is None and len(self._found) >= _MOST:
            self.num_more += 1
            return
        num = 1 if before is None else before.num + 1
        self._found[key] = Mishap(kind, self._step, rank, words[:_MOST_CHARACTERS], num)

    def all(self) -> tuple[Mishap, ...]:
        """Return them in the order of their steps."""
        found = sorted(self._found.values(), key=lambda mishap: mishap.step)
        if self.num_more:
            text = f"{self.num_more} more of these are not listed."
            found.append(Mishap("More", self._step, None, text, self.num_more))
        return tuple(found)


def _words(event: Event) -> str:
    """Return what happened, as a sentence; nothing where it is no mishap."""
    if isinstance(event, RunStarted):
        return f"Training began again, with {event.world_size} ranks."
    if not isinstance(event, (*_RARE, *_OFTEN)):
        return ""
    text = re.sub(r"^step \d+: ", "", happened(event), flags=re.IGNORECASE)  # it has a column
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


MOST_CHANGES = 50


@final
class PlanChanges:
    """Keeps the ``MOST_CHANGES`` largest, by the samples that they move.

    Attributes:
        num: all of them.
    """

    def __init__(self, bins: StepBins) -> None:
        self.num = 0
        self._bins = bins
        self._by_stretch = bins.sums()
        self._largest: list[tuple[float, int, PlanChange]] = []
        self._sizes: tuple[int, ...] | None = None

    def begin(self, sizes: tuple[int, ...] | None) -> None:
        """Continue from ``sizes``, at a start; None is equal ones."""
        self._sizes = sizes

    def add(self, event: Rebalanced) -> None:
        """Take in the next change."""
        before = self._sizes
        if before is not None and len(before) != len(event.batch_size):
            before = None
        self._sizes = event.batch_size
        change = PlanChange(event, before, _moved(before, event.batch_size))
        entry = (change.moved_share, -self.num, change)
        if len(self._largest) < MOST_CHANGES:
            heapq.heappush(self._largest, entry)
        else:
            heapq.heappushpop(self._largest, entry)
        self.num += 1
        self._by_stretch.add(self._bins.at(np.array([event.step], np.int64)), np.ones((1, 1)))

    def largest(self) -> tuple[PlanChange, ...]:
        """Return those that were kept, in their order."""
        return tuple(change for _, _, change in sorted(self._largest, key=lambda one: -one[1]))

    def by_stretch(self, num_stretches: int) -> IntArray:
        """Return how many there were in each stretch."""
        nums: IntArray = self._by_stretch.values[:num_stretches].sum(axis=1).astype(np.int64)
        return nums


def _moved(before: tuple[int, ...] | None, after: tuple[int, ...]) -> float:
    """Return the part of the samples that another rank computes; of a first plan, from equal."""
    total = sum(after)
    if not total:
        return 0.0
    old = before or (total / len(after),) * len(after)
    return sum(abs(new - was) for new, was in zip(after, old, strict=True)) / 2 / total


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
