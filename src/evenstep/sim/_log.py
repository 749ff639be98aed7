"""Rounds written down, step by step."""

from __future__ import annotations

import numpy as np

from .._types import IntArray
from ._rounds import Round
from ._sim_report import SimReport
from ._workload import AbstractWorkload


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
