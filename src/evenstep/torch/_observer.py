"""What hears how the steps of this rank go."""

from __future__ import annotations

from typing import Protocol


class StepObserver(Protocol):
    """Hears of every step, on the thread that trains, while all ranks wait for it: be quick."""

    def begin_step(self, step: int) -> None:
        """Hear that ``step`` begins: no backward is under way."""

    def backward_done(self) -> None:
        """Hear that this rank's own backward is done: from now on it may wait for others."""

    def reduced(self) -> None:
        """Hear that the collectives of that backward are over."""

    def end_step(self, step: int) -> None:
        """Hear that the last backward of ``step`` is over."""
