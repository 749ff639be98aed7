"""One line every few steps that says whether balancing pays."""

from __future__ import annotations

from statistics import fmean
from typing import TextIO

from ..events import Event, StepMeasured
from ._news import news


class ProgressLine:
    """Writes a line for people every ``num_steps`` measured steps, and faults as they come.

    Usage:
        evenstep step 150: batch 32 16 11 5, idle 2 %, step 0.194 s, equal split 0.576 s: saves 66 %

    The figures are means over the steps since the last line; "saves" compares what those steps
    cost with what the equal split would have cost by the fitted times.

    Args:
        stream: where to, such as ``sys.stderr``.
        num_steps: steps between two lines, at least 1.
    """

    def __init__(self, stream: TextIO, num_steps: int) -> None:
        self._stream = stream
        self._num_steps = num_steps
        self._since: list[StepMeasured] = []

    def __call__(self, event: Event) -> None:
        """Collect a step, or say at once what a person has to know."""
        if text := news(event):
            print(f"evenstep {text}", file=self._stream, flush=True)
        if isinstance(event, StepMeasured):
            self._since.append(event)
            if len(self._since) >= self._num_steps:
                print(describe(self._since), file=self._stream, flush=True)
                self._since.clear()


def describe(steps: list[StepMeasured]) -> str:
    """Return the line for ``steps``, at least one, the newest last."""
    last = steps[-1]
    sizes = _shorten(last.batch_size)
    idle = 100 * fmean(step.idle_share for step in steps)
    step_s = fmean(step.makespan_s for step in steps)
    text = f"evenstep step {last.step}: batch {sizes}, idle {idle:.0f} %, step {step_s:.3g} s"
    equal = [step.equal_split_s for step in steps if step.equal_split_s is not None]
    if not equal:
        return text
    equal_s = fmean(equal)
    saving = 100 * (1 - step_s / equal_s)
    verb = "saves" if saving >= 0 else "costs"
    return f"{text}, equal split {equal_s:.3g} s: {verb} {abs(saving):.0f} %"


def _shorten(batch_size: tuple[int, ...]) -> str:
    """Return all sizes of a small cluster, the range of a large one."""
    if len(batch_size) <= 16:
        return " ".join(map(str, batch_size))
    return f"{min(batch_size)} to {max(batch_size)} on {len(batch_size)} ranks"
