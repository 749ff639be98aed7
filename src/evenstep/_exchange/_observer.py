"""What is called as the steps of this rank progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class StepObserver:
    """Is called in every step, on the thread that trains, while all ranks wait for it: be quick.

    A part that only some runs need is one of these. It overrides the methods it wants called; what
    no observer overrides is not called.
    """

    def begin_step(self, step: int) -> None:
        """Note that ``step`` begins: no backward is under way."""

    def first_forward(self, *, equal_forwards: bool) -> None:
        """Note that the step's first forward comes next: what is collective before it goes here.

        Args:
            equal_forwards: whether all ranks make as many in the step, and know it.
        """

    def begin_forward(self, num_samples: int, *, is_last: bool) -> None:
        """Note that a forward of so many samples comes next, perhaps the step's last one."""

    def backward_done(self) -> None:
        """Note that this rank's own backward is done: from now on it may wait for others."""

    def reduced(self) -> None:
        """Note that the collectives of that backward are over."""

    def check_over(self) -> None:
        """Raise if the step's backwards are over here, and what they reduce can never be."""

    def end_step(self, step: int) -> None:
        """Note that the last backward of ``step`` is over."""


def called_by(observers: Iterable[StepObserver], name: str) -> tuple[Callable[..., Any], ...]:
    """Return the methods of this name, of those observers that override it."""
    silent = getattr(StepObserver, name)
    return tuple(getattr(one, name) for one in observers if getattr(type(one), name) is not silent)
