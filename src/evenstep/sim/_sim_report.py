"""What happened in a simulated run, and rounds written down for it, step by step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .._types import FloatArray, IntArray
from ._rounds import Round
from ._workload import AbstractWorkload, BoolArray


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


class Log:
    """Fills the arrays of a report, round after round."""

    def __init__(self, workload: AbstractWorkload) -> None:
        shape = (workload.num_steps, workload.world_size)
        self._step_s = np.empty(shape[0])
        self._batch_size, self._compute_s = np.zeros(shape, np.int64), np.zeros(shape)
        self._staleness, self._num_moves = np.zeros((2, shape[0]), np.int64)
        self._presence = np.zeros(shape, np.bool_)
        self._reasons: list[str] = []

    def put(
        self, step: int, members: IntArray, done: Round, *, reason: str, round_s: float
    ) -> None:
        """Write down the round that began with ``step`` and took ``round_s`` in all."""
        num_steps = len(done.batch_size)
        rows = slice(step, step + num_steps)
        self._step_s[rows] = round_s / num_steps
        self._batch_size[rows, members] = done.batch_size
        self._compute_s[rows, members] = done.compute_s
        self._presence[rows, members] = True
        self._staleness[rows], self._num_moves[rows] = done.staleness, done.num_moves
        self._reasons += [reason] * num_steps

    def report(self) -> SimReport:
        """Return what has happened."""
        changed = (self._presence[1:] != self._presence[:-1]).any(axis=1)
        return SimReport(
            step_s=self._step_s,
            batch_size=self._batch_size,
            compute_s=self._compute_s,
            reasons=tuple(self._reasons),
            staleness=self._staleness,
            num_moves=self._num_moves,
            presence=self._presence,
            restarts=tuple((np.flatnonzero(changed) + 1).tolist()),
        )
