"""Diagnoses, added up by cause and rank."""

from __future__ import annotations

from typing import final

from ..events import WaitingDiagnosed
from ._run_figures import Diagnosed, KnownCause

_MOST = 1000  # causes are text, and a damaged file can have any number of them


@final
class CauseTally:
    """Adds up what each cause cost on each rank."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], KnownCause] = {}
        self._num = self._num_without = 0
        self._explained = 0.0
        self._no_verdict = ""

    def add(self, event: WaitingDiagnosed) -> None:
        """Take in the next diagnosis."""
        self._num += 1
        if event.no_verdict:
            self._num_without += 1
            self._no_verdict = event.no_verdict
            return
        self._explained += event.explained_share
        of_all_s = event.step_s * event.num_steps
        found = (event.causes, event.ranks, event.lost_share, event.evidence, event.remedy)
        for cause, rank, lost_share, evidence, remedy in zip(*found, strict=False):
            before = self._known.get((cause, rank))
            if before is None and len(self._known) >= _MOST:
                continue
            lost_s, num = (before.lost_s, before.num) if before else (0.0, 0)
            lost_s += lost_share * of_all_s
            self._known[cause, rank] = KnownCause(
                cause, rank, lost_s, num + 1, event.step, evidence, remedy
            )

    def result(self) -> Diagnosed | None:
        """Return all of it; None without a diagnosis."""
        if not self._num:
            return None
        num_with = self._num - self._num_without
        return Diagnosed(
            causes=tuple(sorted(self._known.values(), key=lambda one: (-one.lost_s, one.rank))),
            num=self._num,
            explained_share=self._explained / num_with if num_with else None,
            no_verdict=self._no_verdict,
            num_without=self._num_without,
        )
