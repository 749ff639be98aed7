"""What is known of a run in progress: events in, figures out, in constant memory."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from statistics import fmean
from typing import final

import numpy as np

from .._telemetry._line import WholeRun, happened, whole_steps
from .._types import FloatArray
from ..events import (
    Event,
    Rebalanced,
    RunEnded,
    RunStarted,
    StepMeasured,
    StepsAccounted,
    WaitingDiagnosed,
)

WINDOW = 32
"""Steps that current figures are about; of short ones reported together, so many events."""
_PLANS, _NEWS = 3, 4  # the newest of each that are kept
_LEAST_S = 1e-9  # nothing is computed in less
_LONGEST = 400  # characters of a text: reasons and problems have any length


@dataclass(frozen=True, slots=True)
class RankFigures:
    """One rank in the newest steps.

    Attributes:
        rank: which one.
        batch_size: samples of its newest step.
        speed: samples per second of own computing; None where it computed nothing.
        compute_s: seconds of own computing of a step, in the mean.
        input_s: seconds of waiting for its batch.
        waiting_s: seconds of waiting for other ranks.
        lost_s: seconds of a step that the others wait for it: what it takes more than the median
            rank wherever it is the slowest, in the mean of all steps.
        own_s: its computing and waiting for input, step by step, the newest last.
        cause: why others wait for it, as last diagnosed; empty where that is not known.
    """

    rank: int
    batch_size: int
    speed: float | None
    compute_s: float
    input_s: float
    waiting_s: float
    lost_s: float
    own_s: tuple[float, ...]
    cause: str


@final
class LiveRun:
    """Takes the events of a run one by one; what is known is read from its attributes.

    Its memory is that of the newest steps, plans and news, however long the run is. A file may
    hold several runs: the newest counts. Steps that go back are a run that began again, too.

    Attributes:
        start: the newest ``RunStarted``; None where it was not seen.
        first_step: the first step of this run that was seen.
        num_measured: steps that were seen of this run.
        whole: what all of them took, and would have with the equal split.
        diagnosis: the newest one.
        ended: the event at the end; None while the run is in progress.
        accounts: where the time of the newest steps went.
        plans: the newest changes of batch sizes.
        news: the newest step and text of what a person has to know.
    """

    def __init__(self) -> None:
        self.start: RunStarted | None = None
        self._clear()

    def _clear(self) -> None:
        self.whole = WholeRun()
        self.first_step = 0
        self.num_measured = 0
        self.diagnosis: WaitingDiagnosed | None = None
        self.ended: RunEnded | None = None
        self.plans: deque[Rebalanced] = deque(maxlen=_PLANS)
        self.news: deque[str] = deque(maxlen=_NEWS)
        self._steps: deque[StepMeasured] = deque(maxlen=WINDOW)
        self._walls_s: deque[tuple[float, int]] = deque(maxlen=WINDOW)  # and of how many steps
        self.accounts: deque[StepsAccounted] = deque(maxlen=WINDOW)

    def add(self, event: Event) -> None:
        """Take in the next event."""
        match event:
            case RunStarted():
                self._clear()
                self.start = event
            case StepMeasured():
                self._measured(event)
            case StepsAccounted():
                self.accounts.append(event)
            case WaitingDiagnosed():
                self.diagnosis = event
            case Rebalanced():
                self.plans.append(replace(event, reason=event.reason[:_LONGEST]))
            case RunEnded():
                self.ended = event
            case _:
                self._notify(event)

    def _measured(self, step: StepMeasured) -> None:
        if self.last is not None and (
            step.step <= self.last.step or len(step.batch_size) != len(self.last.batch_size)
        ):
            self._clear()
        if self.last is None:
            self.first_step = max(step.step - step.num_steps + 1, 0)
        else:
            two = whole_steps((self.last, step))
            self._walls_s += [(wall_s, before.num_steps) for before, wall_s in two]
        self.whole.add(step)
        self.num_measured += step.num_steps
        self._steps.append(step)

    def _notify(self, event: Event) -> None:
        if text := happened(event):
            self.news.append(text[:_LONGEST])

    @property
    def last(self) -> StepMeasured | None:
        """The newest step; None before the first."""
        return self.whole.last

    @property
    def step_s(self) -> float | None:
        """Seconds of one of the newest steps, in the mean; the slowest rank's alone if need be."""
        if self._walls_s:
            return fmean(*zip(*self._walls_s, strict=True))
        if not self._steps:
            return None
        return fmean([step.makespan_s for step in self._steps], self._num_steps())

    @property
    def idle_share(self) -> float | None:
        """Part of all ranks' time that is waiting for others, in the newest steps."""
        if wall_s := sum(sum(one.wall_s) for one in self.accounts):
            return sum(sum(one.waiting_s) for one in self.accounts) / wall_s
        if not self._steps:
            return None
        return fmean([step.idle_share for step in self._steps], self._num_steps())

    @property
    def left_s(self) -> float | None:
        """Seconds to the end of the epoch, at the pace of the newest steps."""
        if self.ended or not (self.start and self.last and self.step_s and self.start.num_steps):
            return None
        return self.step_s * (self.start.num_steps - 1 - self.last.step % self.start.num_steps)

    def ranks(self) -> list[RankFigures]:
        """Return the figures of all ranks, by what the others wait for them, the most first."""
        if self.last is None:
            return []
        sizes = np.array([step.batch_size for step in self._steps], np.float64)
        compute_s = np.array([step.compute_s for step in self._steps])
        input_s = np.array([step.data_s for step in self._steps])
        own_s = compute_s + input_s
        num = np.array(self._num_steps(), np.float64)
        part = num / num.sum()
        lost_s = _lost_s(own_s, num)
        waiting_s = self._waiting_s()
        causes: dict[int, str] = {}  # the costliest of each rank
        if self.diagnosis is not None:
            pairs = zip(self.diagnosis.ranks, self.diagnosis.causes, strict=True)
            causes = dict(reversed(list(pairs)))
        mean_s = part @ compute_s
        speed = part @ sizes / np.maximum(mean_s, _LEAST_S)
        order = np.lexsort((-part @ own_s, -lost_s))
        return [
            RankFigures(
                rank=rank,
                batch_size=self.last.batch_size[rank],
                speed=float(speed[rank]) if speed[rank] > 0 else None,
                compute_s=float(mean_s[rank]),
                input_s=float(part @ input_s[:, rank]),
                waiting_s=float(waiting_s[rank]),
                lost_s=float(lost_s[rank]),
                own_s=tuple(own_s[:, rank].tolist()),
                cause=causes.get(rank, ""),
            )
            for rank in order.tolist()
        ]

    def _waiting_s(self) -> FloatArray:
        if num_steps := sum(one.num_steps for one in self.accounts):
            total: FloatArray = np.sum([one.waiting_s for one in self.accounts], axis=0)
            return total / num_steps
        idle_s = [step.idle_s for step in self._steps]
        mean: FloatArray = np.average(idle_s, axis=0, weights=self._num_steps())
        return mean

    def _num_steps(self) -> list[int]:
        """Return of how many steps each of the newest events is."""
        return [step.num_steps for step in self._steps]


def _lost_s(own_s: FloatArray, num: FloatArray) -> FloatArray:
    """Return what each rank costs the others in a step.

    Args:
        own_s: of each event and rank.
        num: steps of each event.
    """
    slowest = own_s.argmax(axis=1)
    middle = (own_s.shape[1] - 1) // 2  # the lower one: of two ranks, the other one
    more_s = own_s.max(axis=1) - np.partition(own_s, middle, axis=1)[:, middle]
    summed_s = np.bincount(slowest, num * more_s, minlength=own_s.shape[1])
    lost_s: FloatArray = summed_s / num.sum()
    return lost_s
