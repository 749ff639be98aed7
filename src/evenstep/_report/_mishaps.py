"""What went wrong in a run, and what was done about it: a sentence each, as many as fit."""

from __future__ import annotations

from typing import final

from ..events import (
    BalancingStopped,
    ClaimsSwitched,
    Event,
    LossNotFinite,
    MeasurementRejected,
    MemoryCapped,
    PolicyFailed,
    PolicySlow,
    RunStarted,
    SizesHeld,
    WorkerLost,
    WorkerUnhelpful,
)
from ._run_figures import Mishap

_MOST = 400
_MOST_CHARACTERS = 2000

_TEXTS: dict[type[Event], str] = {
    RunStarted: "Training began again, with {0.world_size} ranks.",
    WorkerLost: "Worker on {0.host} lost: {0.problem}",
    WorkerUnhelpful: "Costs more than it brings: a step takes {0.with_s:.3g} s with it, "
    "{0.without_s:.3g} s without.",
    BalancingStopped: "Balancing stopped, and sizes were equal from then on: {0.problem}",
    SizesHeld: "Batch sizes stayed as they were: {0.problem}",
    MeasurementRejected: "Invalid measurement, and the plan stayed: {0.problem}",
    PolicyFailed: "The policy {0.policy} failed, and the last good plan stayed: {0.problem}",
    PolicySlow: "The policy took {0.decide_s:.3g} s to decide, and was left out for "
    "{0.rest_s:.0f} s.",
    LossNotFinite: "Losses became NaN or infinite, first on the ranks {0.ranks}.",
}
_OFTEN = (MeasurementRejected, PolicyFailed, PolicySlow, MemoryCapped, SizesHeld, WorkerUnhelpful)
"""Told once for each rank, with their number: one that fails does so at every step."""


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
    match event:
        case ClaimsSwitched(on=on):
            return f"Claims during a step were switched {'on' if on else 'off'}."
        case MemoryCapped(max_batch_size=most, capacity_bytes=capacity, unit=unit):
            what = f"At most {most} {unit}"
            if unit == "size":
                what = f"Forwards up to a size of {most}, as `Cost(max_size=...)` counts it,"
            return f"{what} fit into {capacity / 2**30:.3g} GiB."
        case _:
            return _TEXTS.get(type(event), "").format(event)
