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
_MOST_STEPS = 64  # of a reading

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

    A reading has at least half as many steps as the one before, so that a pause of the machine is
    no reading by itself, and that many plans are known beforehand.

    Args:
        reading_s: seconds of computing that short steps take together; 0 makes each step one.

    Attributes:
        num_left: how many more steps the reading under way takes at the least.
    """

    def __init__(self, reading_s: float) -> None:
        self._reading_s = reading_s
        self.num_left = 1
        self._key: Hashable = None
        self._steps: list[Step] = []
        self._took_s: list[float] = []  # the slowest worker's, of each

    def add(
        self,
        key: Hashable,
        took_s: float,
        step: Step,
        *,
        at_once: bool = False,
    ) -> tuple[Step, ...]:
        """Take in a step; return the steps of the reading that it completes, none if it does not.

        Args:
            key: the sizes; steps of others are dropped. None where each step may have its own.
            took_s: seconds that the slowest worker computed.
            step: what was measured.
            at_once: whether to make a reading of what there is.
        """
        if key != self._key:
            self._key, self._steps, self._took_s = key, [], []
        self._steps.append(step)
        self._took_s.append(took_s)
        self.num_left = max(self.num_left - 1, self._num_missing())
        if self.num_left and not at_once:
            return ()
        reading = tuple(self._steps)
        self.num_left = max(1, len(self._steps) // 2)
        self._steps, self._took_s = [], []
        return reading

    @property
    def keeps_for(self) -> int:
        """For how many more steps the plan holds.

        After a reading of several short steps, the plan changes one step later than it could. So no
        rank waits for it.
        """
        return self.num_left if self.num_left > 1 else 0

    def _num_missing(self) -> int:
        """Return how many more steps it takes, if they are like those so far."""
        step_s = max(median(self._took_s), 1e-9)
        needed = 1 if step_s >= LONG_STEP * self._reading_s else round(self._reading_s / step_s)
        return max(0, min(needed, _MOST_STEPS) - len(self._steps))
