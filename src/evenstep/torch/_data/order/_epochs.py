"""How far epochs were handed out, and where a run goes on of which some steps were not used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ._global_order import EpochOrder


@dataclass(slots=True)
class OrderedEpoch:
    """How far an epoch was handed out.

    Attributes:
        order: of its samples.
        number: counted from 1; 0 before the first.
        steps_taken: of it.
    """

    order: EpochOrder
    number: int = 0
    steps_taken: int = 0


class LoopStart(NamedTuple):
    """Where a loop over an epoch began, or went on after another loop.

    Attributes:
        step: of the run, the next one then.
        epoch: that it is over.
        steps_taken: of that epoch before.
    """

    step: int
    epoch: OrderedEpoch
    steps_taken: int


def goes_on(
    step: int, at: OrderedEpoch, starts: Sequence[LoopStart], *, num_steps: int
) -> tuple[OrderedEpoch, int]:
    """Return the epoch that a run goes on with, and how many of its steps are done with.

    A loop that fetches ahead may have begun the next epoch before it used all of the last one.

    Args:
        step: the first one of the run that was handed out and not used, else the next one.
        at: the newest epoch.
        starts: of the newest loops, in their order.
        num_steps: of an epoch; one of fewer that others follow was broken off, and is over.
    """
    taken = at.steps_taken  # before it is looked for: another thread may hand out meanwhile
    ends = [*(start.step for start in starts[1:]), step + 1]
    for (first, epoch, before), end in zip(starts, ends, strict=False):
        place = before + max(step - first, 0)
        is_meant = epoch is at or (first < step and epoch.steps_taken == num_steps)
        if is_meant and step < end and place < epoch.steps_taken:
            return epoch, place
    return at, taken
