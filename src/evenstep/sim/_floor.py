"""Simulated workers that carry out one plan after the other."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._types import IntArray
from ..claims import AbstractScheme
from ._rounds import Round, as_planned, in_turns
from ._workload import AbstractWorkload


class Floor:
    """The workers of a run under one scheme, and what they know of each other's speeds.

    Args:
        workload: what computing takes.
        scheme: what becomes of a plan while its step runs.
    """

    def __init__(self, workload: AbstractWorkload, scheme: AbstractScheme[Any]) -> None:
        self._workload, self._scheme = workload, scheme
        self._speeds = np.full(workload.world_size, np.nan)  # until they are measured
        self._newest_s = np.full(workload.world_size, np.nan)

    def round(self, step: int, members: IntArray, batch_size: IntArray) -> Round:
        """Return what follows from a plan, up to the next barrier.

        Args:
            step: the first step of the round.
            members: the workers that are there, ascending, ``(num_members,)``.
            batch_size: the plan, likewise; the round's arrays are about these workers too.
        """
        if self._scheme.moves_samples:
            return self._in_turns(step, members, batch_size)
        newest_s = self._newest_s[members]
        is_known = np.isfinite(newest_s).all()
        local_steps = self._scheme.local_steps(newest_s if is_known else np.ones(len(members)))
        steps = self._steps(step, members, int(local_steps.min()))
        # A round that is cut short is so for everybody.
        cut = np.maximum(local_steps * len(steps) // local_steps.min(), 1)
        planned = np.zeros(self._workload.world_size, np.int64)
        planned[members] = batch_size
        seconds = np.array([self._workload.seconds(at, planned)[members] for at in steps])
        done = as_planned(seconds, batch_size, cut)
        self._newest_s[members] = np.where(batch_size > 0, done.shown_s, newest_s)
        return done

    def _in_turns(self, step: int, members: IntArray, batch_size: IntArray) -> Round:
        def chunk_s(rank: int, num_samples: int, again: bool) -> float:
            return self._workload.chunk_s(step, int(members[rank]), num_samples, again=again)

        speeds = self._speeds[members]
        done = in_turns(self._scheme, batch_size, speeds, chunk_s)
        self._speeds[members] = speeds
        return done

    def _steps(self, first: int, members: IntArray, most: int) -> range:
        """Return at most so many steps with the same members."""
        last = min(first + most, self._workload.num_steps)
        for step in range(first + 1, last):
            if not np.array_equal(self._workload.members(step), members):
                return range(first, step)
        return range(first, last)
