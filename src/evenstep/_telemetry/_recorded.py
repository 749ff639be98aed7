"""The newest run in a file of events: who trained, and the steps that were measured."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from ..events import Event, MemoryCapped, Rebalanced, RunStarted, StepMeasured
from ..exceptions import invalid
from ._event_file import EventFile

WARM_UP = 1
"""Steps at the start that readers pass over, as training does: kernels are chosen, memory is found.
"""
MOST_STEPS = 20_000
"""The newest steps that are kept, at most: 64 ranks take 200 MB for them."""

_WANTED = frozenset({"StepMeasured", "MemoryCapped", "Rebalanced"})


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a file of events says of the run that began last in it.

    Attributes:
        file: the file.
        start: its ``RunStarted``; None where that was not recorded.
        steps: the newest ``StepMeasured``, each with the line that says so, at least one, all of
            as many workers, with times and sizes that can be.
        caps: the last known largest batch of a rank, where there was one. Empty in a loop that
            takes micro-batches: what is known there bounds one forward.
    """

    file: Path
    start: RunStarted | None
    steps: list[tuple[int, StepMeasured]]
    caps: dict[int, int]

    @classmethod
    def of(cls, path: str | Path, *, caller: str) -> Recorded:
        """Return what a run's folder, or its ``events.jsonl``, says.

        From the last start in the file on, if training began more than once: earlier workers may
        have been others. What is damaged is left out, with a warning of the logger ``evenstep``.

        Args:
            path: the folder or the file.
            caller: the function that was given it, for errors.

        Raises:
            ValueError: there is no measured step, or nothing is an event.
            OSError: the file cannot be read.
        """
        start: RunStarted | None = None
        steps: deque[tuple[int, StepMeasured]] = deque(maxlen=MOST_STEPS)
        caps: dict[int, int] | None = {}
        events = EventFile(path, wanted=_WANTED, check=_check)
        try:
            for line, event in events:
                match event:
                    case RunStarted():
                        start, caps = event, {}
                        steps.clear()
                    case StepMeasured():
                        steps.append((line, event))
                    case MemoryCapped() | Rebalanced():
                        caps = _caps_after(event, caps)
        except ValueError as error:
            raise ValueError(f"`{caller}(path=...)`: {error}") from error
        file, left_out = events.path, str(events.left_out)
        if not steps:
            got = f"none in {file}" + (f" ({left_out})" if left_out else "")
            remedy = "Train with `Runtime(run_dir=...)`, a few steps are enough."
            raise invalid(f"{caller}(path=...)", "hold a measured step", got, remedy)
        if left_out:
            logging.getLogger("evenstep").warning("%s: %s. The rest is used.", file, left_out)
        return cls(file, start, list(steps), caps or {})

    @property
    def global_batch_size(self) -> int:
        """Samples of a full step; those of the newest step where no start was recorded."""
        if self.start is None:
            return sum(self.steps[-1][1].batch_size)
        return self.start.global_batch_size


def _caps_after(
    event: MemoryCapped | Rebalanced, caps: dict[int, int] | None
) -> dict[int, int] | None:
    """Return the caps of local batches; None once they are known to bound one forward only."""
    if isinstance(event, Rebalanced):
        return caps if event.max_forward is None else None
    if caps is None or event.unit != "samples":
        return caps
    return {**caps, event.rank: event.max_batch_size}


def _check(event: Event) -> None:
    """Raise for a step in which a worker computed in no time, of which nothing can be learnt."""
    if not isinstance(event, StepMeasured):
        return
    for rank, (size, second) in enumerate(zip(event.batch_size, event.compute_s, strict=True)):
        if size and not second > 0:
            name = "`StepMeasured(compute_s=...)`"
            raise ValueError(f"{name} must be positive for {size} samples, got 0 of rank {rank}")
