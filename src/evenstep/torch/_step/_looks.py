"""When a run is looked at for mistakes: in its first steps, and ever more rarely later."""

from __future__ import annotations

import math
from weakref import WeakSet

import torch

_STEPS = 3  # of a look
_SECOND = 8  # the step at which it begins; each look after that comes at twice the steps


class Looks:
    """The one schedule of looks; this one has none, as where every weight is 1.

    The first look begins with the run, the others at steps 8, 16, 32 and so on. An optimizer is
    also looked at when it takes its first step, whenever that is. Outside of looks no hook is left,
    and the thread that trains compares one number in each step.

    Attributes:
        due: how many steps are over when the next look begins, or when the one under way ends.
        is_open: whether one is under way.
        optimizers: those that have taken a step.
    """

    def __init__(self) -> None:
        self.due = math.inf
        self.is_open = False
        self.optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()

    def turn(self, num_steps: int) -> None:
        """Begin a look, or end the one under way, after so many steps."""
        self.is_open = not self.is_open
        if self.is_open:
            self.due = num_steps + _STEPS
        else:
            self.due = max(_SECOND, 1 << num_steps.bit_length())

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer steps: for the first time, or in a look."""
        self.optimizers.add(optimizer)
