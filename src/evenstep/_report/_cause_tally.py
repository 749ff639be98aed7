"""Diagnoses, added up by cause and rank."""

from __future__ import annotations

from dataclasses import replace
from typing import final

from ..events import WaitingDiagnosed
from ._run_figures import Diagnosed, KnownCause

_MOST = 1000  # causes are text, and a damaged file can have any number of them
_NEARLY_ALL = 0.9  # of a start's steps: the first ones and those after a gap are left out


@final
class CauseTally:
    """Adds up what each cause cost on each rank.

    Diagnoses overlap: each is about the newest minute, and the last one of a start about all of it.
    So one on nearly all steps of a start stands in place of those before it, and of another one
    only the steps count that were not counted for this cause.

    Some runs tell a diagnosis only if it names other causes than the one before. So the newest one
    holds until the steps that the next one is about.
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
            if before is None and len(self._known) >= _MOST:
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
