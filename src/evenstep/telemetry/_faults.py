"""Say once, to a person, what training went on in spite of."""

from __future__ import annotations

import logging

from ..events import Event, LossNotFinite, MeasurementRejected, PolicyFailed, PolicySlow


class FaultLog:
    """Logs a warning for the policy's first failure and rest, each rank's measurements, and NaN.

    Not for each: a policy that fails once mostly fails at every step, and the events have them
    all. Goes through the logger ``evenstep``, which reaches standard error unless it is set up
    otherwise, whatever the progress line is set to.
    """

    def __init__(self) -> None:
        self._told: set[int | str] = set()

    def __call__(self, event: Event) -> None:
        """Log ``event`` if it is the first of its kind."""
        match event:
            case PolicyFailed(step=step, problem=problem, policy=policy):
                text = (
                    f"Step {step}: the policy {policy} failed, and the last good plan stays "
                    f"({problem})."
                )
                self._tell("failed", text)
            case PolicySlow(step=step, decide_s=decide_s, rest_s=rest_s):
                text = (
                    f"Step {step}: the policy took {decide_s:.1f} s to decide, for the second time "
                    f"in a row, and all ranks waited. It is called again after {rest_s:.0f} s; "
                    f"until then the sizes stay."
                )
                self._tell("slow", text)
            case MeasurementRejected(step=step, rank=rank, problem=problem):
                text = (
                    f"Step {step}: rank {rank} sent an invalid measurement, and the plan stays: "
                    f"{problem}."
                )
                self._tell(rank, text)
            case LossNotFinite(step=step, ranks=ranks):
                whose = " and ".join(f"rank {rank}" for rank in ranks)
                text = (
                    f"From step {step} on losses are NaN or infinite, first on {whose}: check the "
                    f"batch and the loss there. Averaged gradients spread it to the parameters of "
                    f"all ranks for good: restart from a checkpoint of an earlier step."
                )
                self._tell("loss", text)

    def _tell(self, whose: int | str, text: str) -> None:
        if whose not in self._told:
            self._told.add(whose)
            logging.getLogger("evenstep").warning(
                "%s Training continues; this warning is given once.", text
            )
