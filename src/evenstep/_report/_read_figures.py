"""A run's file of events in, its figures out, in memory that does not grow with the run."""

from __future__ import annotations

import heapq
import re
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np

from .._telemetry import EventFile
from .._telemetry._event_lines import run_name
from .._telemetry._line import happened
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
from ._step_tally import AccountFigures, StepFigures, Stretches

_MOST_CAUSES = 1000  # causes are text, and a damaged file can have any number of them
_NEARLY_ALL = 0.9  # of a start's steps: the first ones and those after a gap are left out


@dataclass(slots=True)
class KnownCause:
    """A cause of waiting on one rank, over all diagnoses.

    Attributes:
        cause: such as ``"input"``.
        rank: whose; -1 for no rank's in particular.
        lost_s: seconds of the cluster's time that it cost.
        num: diagnoses that named it.
        evidence, remedy: of the newest.
        start_s: what it cost since the newest start.
        until: step of that start up to which its cost is counted; None where it cost nothing yet.
        each_s: what it costs in a step by the newest diagnosis; 0 if that does not name it.
    """

    cause: str
    rank: int
    lost_s: float = 0.0
    num: int = 0
    evidence: str = ""
    remedy: str = ""
    start_s: float = 0.0
    until: int | None = None
    each_s: float = 0.0

    def cost(self, more_s: float, until: int) -> None:
        """Count ``more_s`` for the steps up to ``until``."""
        self.lost_s += more_s
        self.start_s += more_s
        self.until = until


@final
class CauseFigures:
    """Adds up what each cause cost on each rank.

    Diagnoses overlap: each is about the newest minute, and the last one of a start about all of it.
    So one on nearly all steps of a start stands in place of those before it, and of another one
    only the steps count that were not counted for this cause.

    Some runs report a diagnosis only if it names other causes than the one before. So the newest
    one holds until the steps that the next one is about; ``hold`` has to follow the last event.

    Attributes:
        num: diagnoses.
        num_without: those without a verdict.
        no_verdict: why the newest of these has none; empty where all have one.
    """

    def __init__(self) -> None:
        self.num = self.num_without = 0
        self.no_verdict = ""
        self._known: dict[tuple[str, int], KnownCause] = {}
        self._first = self._newest = -1  # of the steps that diagnoses of this start are about
        self._explained = 0.0

    @property
    def causes(self) -> list[KnownCause]:
        """The costliest first."""
        return sorted(self._known.values(), key=lambda one: (-one.lost_s, one.rank))

    @property
    def explained_share(self) -> float | None:
        """Of the waiting, mean over diagnoses with a verdict; None without any."""
        num_with = self.num - self.num_without
        return self._explained / num_with if num_with else None

    def begin(self, step: int) -> None:
        """Have what comes be of a new start, which has steps of its own.

        Args:
            step: the newest one of the start before.
        """
        self.hold(step)
        self._first = self._newest = -1
        for one in self._known.values():
            one.start_s, one.until, one.each_s = 0.0, None, 0.0

    def hold(self, step: int) -> None:
        """Have the causes of the newest diagnosis cost as much in all steps up to this one."""
        for one in self._known.values():
            if one.until is not None and one.each_s:
                one.cost(one.each_s * max(0, step - one.until), max(one.until, step))

    def add(self, event: WaitingDiagnosed) -> None:
        """Take in the next diagnosis."""
        before_first = event.step - event.num_steps
        if self._newest < 0 or event.step < self._newest:
            self.begin(event.step)
            self._first = before_first
        self._newest = event.step
        is_of_all = event.num_steps >= _NEARLY_ALL * (event.step - self._first)
        if not is_of_all:
            self.hold(before_first)
        for one in self._known.values():
            one.each_s = 0.0
        self.num += 1
        if event.no_verdict:
            self.num_without += 1
            self.no_verdict = event.no_verdict
            return
        self._explained += event.explained_share
        found = (event.causes, event.ranks, event.lost_share, event.evidence, event.remedy)
        for cause, rank, lost_share, evidence, remedy in zip(*found, strict=True):
            if (cause, rank) not in self._known and len(self._known) >= _MOST_CAUSES:
                continue
            one = self._known.setdefault((cause, rank), KnownCause(cause, rank))
            one.num, one.evidence, one.remedy = one.num + 1, evidence, remedy
            one.each_s = lost_share * event.step_s
            until = before_first if one.until is None else one.until
            num_new = event.num_steps if is_of_all else min(event.num_steps, event.step - until)
            one.cost(one.each_s * num_new - one.start_s * is_of_all, event.step)


MOST_SHARES = 30


@final
class LinkFigures:
    """Adds up events on unequal links; ``finish`` has to follow.

    Attributes:
        first, last: the first and the newest measurement of links; None without any.
        num_measured: how many there were.
        shares: the newest plans of shares, in order.
        num_shares: all of them.
        exchange_s, predicted_s: of an exchange, mean by stretch, NaN without any.
        least_s, most_s: of an exchange, by stretch.
    """

    def __init__(self, bins: Stretches) -> None:
        self._bins = bins
        self.first: LinksMeasured | None = None
        self.last: LinksMeasured | None = None
        self.num_measured = self.num_shares = 0
        self.shares: deque[SharesPlanned] = deque(maxlen=MOST_SHARES)

    def add(self, event: LinksMeasured | SharesPlanned | ExchangeMeasured) -> None:
        """Take in the next event."""
        if isinstance(event, LinksMeasured):
            self.first, self.last = self.first or event, event
            self.num_measured += 1
        elif isinstance(event, SharesPlanned):
            self.shares.append(event)
            self.num_shares += 1
        else:
            at, one = self._bins.at(np.array([event.step], np.int64)), np.ones(1)
            exchange_s = np.array([event.exchange_s])
            predicted_s = np.array([event.predicted_s], np.float64)  # None is NaN
            self._bins.add_mean("exchange", at, exchange_s, one)
            self._bins.add_mean("predicted", at, predicted_s, one)
            self._bins.add_range("exchange", at, exchange_s)

    def finish(self, num_stretches: int) -> None:
        """Have all attributes say what was added, by so many stretches."""
        means = [self._bins.mean(name)[:num_stretches] for name in ("exchange", "predicted")]
        self.exchange_s, self.predicted_s = means
        self.least_s, self.most_s = (one[:num_stretches] for one in self._bins.range("exchange"))


MOST_CHANGES = 50


@dataclass(frozen=True, slots=True)
class PlanChange:
    """Other batch sizes.

    Attributes:
        event: what was decided.
        before: the sizes until then; None of a start's first plan, if it began with equal ones.
        moved_share: samples that another rank computes from then on, as a part of all.
    """

    event: Rebalanced
    before: tuple[int, ...] | None
    moved_share: float


def _moved(before: tuple[int, ...] | None, after: tuple[int, ...]) -> float:
    """Return the part of the samples that another rank computes; of a first plan, from equal."""
    total = sum(after)
    if not total:
        return 0.0
    old = before or (total / len(after),) * len(after)
    return sum(abs(new - was) for new, was in zip(after, old, strict=True)) / 2 / total


_MOST_CHARACTERS = 2000


@dataclass(frozen=True, slots=True)
class Mishap:
    """What went wrong, or what was done about it: the newest of its kind on a rank.

    One that fails does so at every step.

    Attributes:
        kind: name of the event.
        step: when.
        rank: whose; None where it is no rank's.
        text: a sentence.
        num: events of this kind on this rank.
    """

    kind: str
    step: int
    rank: int | None
    text: str
    num: int


def _words(event: Event) -> str:
    """Return what happened, as a sentence; nothing where it is no mishap."""
    if isinstance(event, RunStarted):
        return f"Training began again, with {event.world_size} ranks."
    if isinstance(event, (WaitingDiagnosed, SharesPlanned)):  # these have sections of their own
        return ""
    text = re.sub(r"^step \d+: ", "", happened(event), flags=re.IGNORECASE)  # it has a column
    return text and f"{text[:1].upper()}{text[1:].rstrip('.')}."


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
    events = EventFile(path)
    figures = ReportFigures(run_name(path))
    for event in events:
        figures.add(event)
    if not figures.finish():
        remedy = "Train with `Runtime(run_dir=...)`, a few steps are enough."
        got = f"none in {events.path}"
        raise invalid("read_figures(path=...)", "hold a measured step", got, remedy)
    figures.left_out = events.left_out
    return figures


@final
class ReportFigures:
    """All that is reported of a run: takes in one event after the other, then ``finish``.

    Args:
        name: of its folder, or its file.

    Attributes:
        start: the newest start; None where none was recorded.
        num_starts: how often training began.
        is_ended: whether the newest start came to its end.
        keeps_equal: whether the sizes were kept equal in all that was measured, as by ``Equal``.
        world_size: of the largest start.
        num_steps: measured steps.
        first_step, last_step: their range.
        edges: first step of every stretch, ``(stretches,)``.
        width: steps in a stretch.
        steps: of measured steps.
        accounts: of accounts; None without any.
        diagnosed: causes of waiting; None without a diagnosis.
        changes: the ``MOST_CHANGES`` that moved most samples, in order of steps.
        num_changes: all of them.
        changes_by_stretch: ``(stretches,)``.
        mishaps: in order of steps.
        links: None where nothing was reported of them.
        left_out: what of the file was not used, as a sentence; empty where all was.
    """

    def __init__(self, name: str) -> None:
        self.name, self.left_out = name, ""
        self.start: RunStarted | None = None
        self.num_starts = self.world_size = self.num_changes = 0
        self.is_ended, self.keeps_equal = False, True
        bins = self._bins = Stretches()
        self.steps = StepFigures(bins)
        self.accounts: AccountFigures | None = None
        self.links: LinkFigures | None = None
        self.diagnosed: CauseFigures | None = None
        self._measured: list[StepMeasured] = []
        self._accounted: list[StepsAccounted] = []
        self._num_ranks = 0  # in the newest steps
        self._step = self._newest = -1  # the newest that was measured, and of the newest event
        self._sizes: tuple[int, ...] | None = None  # None is equal ones
        self._largest: list[tuple[float, int, PlanChange]] = []
        self._mishaps: dict[tuple[str, int | None], Mishap] = {}

    def finish(self) -> bool:
        """Have all attributes say what was added; return whether any step was measured."""
        self._flush()
        if not self.steps.num_steps:
            return False
        self.num_steps, self.last_step = self.steps.num_steps, self.steps.last_step
        self.first_step, self.width = self._bins.first or 0, self._bins.width
        num = (self.last_step - self.first_step) // self.width + 1
        self.edges = self.first_step + self.width * np.arange(num)
        self.steps.finish(num, self.world_size)
        if self.accounts is not None:
            self.accounts.finish(num, self.world_size)
        if self.links is not None:
            self.links.finish(num)
        if self.diagnosed is not None:
            self.diagnosed.hold(self._step)
        self.changes = [one for _, _, one in sorted(self._largest, key=lambda each: -each[1])]
        self.changes_by_stretch = self._bins.table("changes")[:num, 0].astype(np.int64)
        self.mishaps = sorted(self._mishaps.values(), key=lambda mishap: mishap.step)
        return True

    def add(self, event: Event) -> None:
        """Take in the next event."""
        self._newest = getattr(event, "step", self._step)
        self._add_mishap(event)
        match event:
            case StepMeasured() | StepsAccounted():
                self._add_steps(event)
            case RunStarted():
                self._begin(event)
            case EstimatesRestored():
                self._sizes = event.batch_size
            case RunEnded():
                self.is_ended = True
            case Rebalanced():
                self._add_change(event)
            case WaitingDiagnosed():
                self.diagnosed = self.diagnosed or CauseFigures()
                self.diagnosed.add(event)
            case LinksMeasured() | SharesPlanned() | ExchangeMeasured():
                self.links = self.links or LinkFigures(self._bins)
                self.links.add(event)

    def _begin(self, event: RunStarted) -> None:
        self._flush()
        self.start, self.is_ended, self._sizes = event, False, None
        self.num_starts += 1
        if self.diagnosed is not None:
            self.diagnosed.begin(self._step)
        self._num_ranks = event.world_size
        self.world_size = max(self.world_size, event.world_size)

    def _add_steps(self, event: StepMeasured | StepsAccounted) -> None:
        num_ranks = len(event.batch_size if isinstance(event, StepMeasured) else event.wall_s)
        if num_ranks != self._num_ranks:
            self._flush()
            self._num_ranks = num_ranks
            self.world_size = max(self.world_size, num_ranks)
        self._bins.begin(max(event.step - event.num_steps + 1, 0))
        if isinstance(event, StepMeasured):
            self._measured.append(event)
            self._step = event.step
            self.keeps_equal &= self.start is not None and self.start.keeps_equal
        else:
            self._accounted.append(event)
        if max(len(self._measured), len(self._accounted)) * num_ranks >= _BLOCK_NUMBERS:
            self._flush()

    def _flush(self) -> None:
        """Add up the steps that are waiting."""
        self.steps.add(self._measured)
        if self._accounted:
            self.accounts = self.accounts or AccountFigures(self._bins)
            self.accounts.add(self._accounted)
        self._measured, self._accounted = [], []

    def _add_change(self, event: Rebalanced) -> None:
        before, self._sizes = self._sizes, event.batch_size
        if before is not None and len(before) != len(event.batch_size):
            before = None
        change = PlanChange(event, before, _moved(before, event.batch_size))
        heapq.heappush(self._largest, (change.moved_share, -self.num_changes, change))
        if len(self._largest) > MOST_CHANGES:
            heapq.heappop(self._largest)
        self.num_changes += 1
        self._bins.add("changes", self._bins.at(np.array([event.step], np.int64)), np.ones(1))

    def _add_mishap(self, event: Event) -> None:
        words, kind, rank = _words(event), type(event).__name__, getattr(event, "rank", None)
        is_first_start = isinstance(event, RunStarted) and not self.num_starts and self._step < 0
        if not words or is_first_start:
            return
        key = kind, rank
        num = self._mishaps[key].num + 1 if key in self._mishaps else 1
        self._mishaps[key] = Mishap(kind, self._newest, rank, words[:_MOST_CHARACTERS], num)
