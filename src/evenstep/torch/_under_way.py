"""What a rank knows of the step that it is in."""

from __future__ import annotations

from dataclasses import dataclass

from .._exchange._unit_sums import UnitSum


@dataclass(slots=True)
class StepUnderWay:
    """What is known of the step under way."""

    number: int
    num_samples: int
    global_num_samples: int
    data_s: float
    wall_s: float | None
    units: float | None = None
    unit_sum: UnitSum | None = None
    num_forwards: int = 0
    num_backwards: int = 0
    num_done: int = 0  # samples of the forwards so far
    largest: int = 0  # samples of its largest forward
    again: bool = False  # whether memory ran out in it
    on_last_forward: bool = False
    reported: bool = False
