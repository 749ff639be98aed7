"""Takes in what all ranks say of their steps, and answers at any time who waits for whom, and why.

How to use it, on the one rank or in the one process that hears of all ranks:

    diagnoser = Diagnoser(world_size)
    diagnoser.add(step, spent_us, clues)  # for every step that all ranks have told of
    diagnoser.add_host(rank, clues)  # whenever a rank has looked at its process and machine
    diagnosed(diagnoser.diagnose())  # once a second or less: the event ``WaitingDiagnosed``
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from ._causes import Diagnosis
from ._clues import HostClues, StepClues


@final
class Diagnoser:
    """Finds who the others wait for, and why, in constant memory.

    Args:
        world_size: number of ranks.
        window_s: how many of the newest seconds ``diagnose`` looks at.
    """

    def __init__(self, world_size: int, *, window_s: float = 60.0) -> None:
        self._world_size = world_size
        self._window_s = window_s

    def add(
        self,
        step: int,
        spent_us: Sequence[Sequence[int]],
        clues: Sequence[StepClues] | None = None,
    ) -> None:
        """Take in a step that all ranks have told of. Steps come in order; some may be missing.

        A step lasts from its hand-out to the next one's, so what leads to a batch is in the step
        before it.

        Args:
            step: its number.
            spent_us: microseconds by rank and ``Phase``, as ``time_by_phase`` gives them.
            clues: of each rank; None where there are none.
        """

    def add_host(self, rank: int, clues: HostClues) -> None:
        """Take in what a rank's process and machine did since the look before."""

    def diagnose(self, *, whole_run: bool = False) -> Diagnosis:
        """Return who the others wait for, and why, in the newest seconds or in the whole run."""
        raise NotImplementedError
