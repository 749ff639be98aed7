"""Short steps taken together: one of a few milliseconds says little, and a fit takes as long."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cached_property
from statistics import median
from typing import Generic, TypeVar, final

import numpy as np

from .._types import StepTimings

LONG_STEP = 1 / 3
"""Of a reading's seconds: such a step is one by itself."""
MOST_STEPS = 32
"""Of a reading, and between two decisions."""

Step = TypeVar("Step")


@final
class Reading:
    """One or more steps at the same sizes, seen as one.

    Args:
        steps: what was measured in each, in order; made when it is asked for.
    """

    def __init__(self, steps: tuple[Callable[[], StepTimings], ...]) -> None:
        self._steps = steps

    @property
    def num_steps(self) -> int:
        """How many there are."""
        return len(self._steps)

    @cached_property
    def timings(self) -> StepTimings:
        """Every worker's median, which pauses of the machine leave alone.

        What else is known is as in the newest step.
        """
        if len(self._steps) == 1:
            return self._steps[0]()
        steps = [step() for step in self._steps]
        ran = steps[-1].batch_size > 0
        compute_s = np.median([step.compute_s for step in steps], axis=0)
        return replace(
            steps[-1],
            compute_s=np.where(ran, compute_s, 0.0),
            data_s=np.median([step.data_s for step in steps], axis=0),
            num_steps=len(steps),
        )


@final
class Readings(Generic[Step]):
    """Collects steps until they have taken long enough together; long ones are taken alone.

    How many steps the next reading has is known when one is complete, by their median. So a pause
    of the machine is no reading by itself, and ranks know beforehand when the next plan is due.

    Args:
        reading_s: seconds that short steps take together; 0 makes each step one.

    Attributes:
        num_left: how many more steps the reading under way takes at the least; 1 or more.
    """

    def __init__(self, reading_s: float) -> None:
        self._reading_s = reading_s
        self.num_left = 1
        self._key: Hashable = None
        self._steps: list[Step] = []
        self._took_s: list[float] = []  # the slowest worker's, of each
        self._lasted_s: list[float] = []  # from batch to batch

    def add(
        self,
        key: Hashable,
        took_s: float,
        step: Step,
        *,
        wall_s: float = 0.0,
        at_once: bool = False,
    ) -> tuple[Step, ...]:
        """Take in a step; return the steps of the reading that it completes, none if it does not.

        Args:
            key: the sizes; steps of others are dropped. None where each step may have its own.
            took_s: seconds that the slowest worker computed.
            step: what was measured.
            wall_s: seconds from batch to batch, where that is known and more.
            at_once: whether to make a reading of what there is.
        """
        if key != self._key:
            self._key, self._steps, self._took_s, self._lasted_s = key, [], [], []
        self._steps.append(step)
        self._took_s.append(took_s)
        self._lasted_s.append(max(wall_s, took_s))
        needed = num_together(self._reading_s, median(self._took_s), median(self._lasted_s))
        num_left = max(self.num_left - 1, needed - len(self._steps))
        if num_left and not at_once:
            self.num_left = num_left
            return ()
        reading = tuple(self._steps)
        self.num_left = needed
        self._steps, self._took_s, self._lasted_s = [], [], []
        return reading


def num_together(seconds: float, took_s: float, lasted_s: float) -> int:
    """Return how many steps are decided on together: the steps of so many seconds, or one.

    Args:
        seconds: that they take together.
        took_s: that the slowest worker computes in a step.
        lasted_s: from batch to batch.
    """
    if not took_s < LONG_STEP * seconds:  # no number is no short step
        return 1
    return min(max(round(seconds / max(lasted_s, 1e-9)), 1), MOST_STEPS)
