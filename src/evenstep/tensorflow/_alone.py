"""What stands in for a run where there is one worker: it computes everything."""

from __future__ import annotations

from .._planner import Plan


class Alone:
    """The conductor of a single worker, which shares with no other.

    A batch counts as trained on when the next one is asked for, as nothing is woven into a model
    that trains alone.

    Args:
        batch_size: samples of a step.
        tail_size: of the short last one; 0 if there is none.
        first_step: number of the first step, counted over the run.
    """

    def __init__(self, batch_size: int, tail_size: int, *, first_step: int) -> None:
        self.plan = Plan(0, 0, (batch_size,), tail=(tail_size,) if tail_size else None)
        self.num_done = first_step
        self.is_under_way = False
        self.conductor = self

    def next_plan(self) -> Plan:
        """Return the plan of every step."""
        return self.plan

    def begin_step(self, batch_size: int, *, global_num_samples: int, data_s: float) -> None:
        """Count the step."""
        self.num_done += 1

    def end_epoch(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
