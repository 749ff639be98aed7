"""What happened in a simulated run."""

from __future__ import annotations

from dataclasses import dataclass

from .._types import FloatArray, IntArray
from ._workload import BoolArray


@dataclass(frozen=True, slots=True, eq=False)
class SimReport:
    """What happened in a simulated run.

    If ranks average parameters only after several steps (local SGD), the seconds of a round are
    spread evenly over its steps, and a step counts all samples that a worker computed in it.

    Attributes:
        step_s: seconds of every step, communication included, ``(num_steps,)``.
        batch_size: samples that each worker computed, ``(num_steps, world_size)``.
        compute_s: seconds that each worker computed, without claims and hand-overs,
            ``(num_steps, world_size)``.
        reasons: the policy's reason for the plan of every step.
        staleness: most local steps that a worker had taken since the last average when it began
            one in this step, ``(num_steps,)``. 0 if gradients are summed in every step.
        num_moves: claims and hand-overs, ``(num_steps,)``.
        presence: which workers took part, ``(num_steps, world_size)``.
        restarts: steps before which workers left or joined.
    """

    step_s: FloatArray
    batch_size: IntArray
    compute_s: FloatArray
    reasons: tuple[str, ...]
    staleness: IntArray
    num_moves: IntArray
    presence: BoolArray
    restarts: tuple[int, ...]

    @property
    def idle_share(self) -> float:
        """Share of the time of the present workers that was not spent computing, in [0, 1)."""
        paid_s = (self.step_s * self.presence.sum(axis=1)).sum()
        return float(1 - self.compute_s.sum() / paid_s)

    @property
    def samples_per_s(self) -> float:
        """Samples of all workers over the time of all steps."""
        return float(self.batch_size.sum() / self.step_s.sum())

    def regret(self, oracle_s: FloatArray) -> float:
        """Return the mean step time divided by that of ``oracle``, minus 1; for equal batches."""
        return float(self.step_s.mean() / oracle_s.mean() - 1)
