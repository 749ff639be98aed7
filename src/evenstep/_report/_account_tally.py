"""Accounts of steps, added up by stretch and by rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from ..events import StepsAccounted
from ._run_figures import PARTS, AccountFigures
from ._step_bins import StepBins, over


@final
class AccountTally:
    """Adds up ``StepsAccounted``, many of them at a time.

    The time of several short steps that were told together is spread evenly over them.

    Attributes:
        num_steps: steps that were accounted for.
    """

    def __init__(self, bins: StepBins) -> None:
        self.num_steps = 0
        self._bins = bins
        self._part_s, self._rank_steps = bins.sums(), bins.sums()
        self._waiting_s, self._wall_s = bins.sums(), bins.sums()
        self._by_rank = bins.sums()  # one after the other: all parts of a rank, then the next

    def add(self, events: Sequence[StepsAccounted]) -> None:
        """Add accounts of as many ranks each, in their order."""
        if not events:
            return
        num = np.array([event.num_steps for event in events], np.int64)
        last = np.array([event.step for event in events], np.int64)
        times_s = np.array([[getattr(event, part) for part in PARTS] for event in events])
        row, at, weight = self._bins.spread(last, num)
        part_s = times_s[row] * weight[:, None, None]
        wall_s = part_s.sum(axis=1)
        self._part_s.add(at, part_s.sum(axis=2))
        self._rank_steps.add(at, (num[row] * weight)[:, None] * wall_s.shape[1])
        self._waiting_s.add(at, part_s[:, PARTS.index("waiting_s")])
        self._wall_s.add(at, wall_s)
        self._by_rank.add(at, part_s.transpose(0, 2, 1).reshape(len(row), -1))
        self.num_steps += int(num.sum())

    def figures(self, num_stretches: int, world_size: int) -> AccountFigures:
        """Return all of it, by so many stretches and ranks."""
        self._waiting_s.widen(world_size)  # some ranks may have been lost before an account
        self._wall_s.widen(world_size)
        self._by_rank.widen(world_size * len(PARTS))
        part_s, num = self._part_s.values[:num_stretches], self._rank_steps.values[:num_stretches]
        waiting = over(self._waiting_s.values, self._wall_s.values)[:num_stretches]
        return AccountFigures(
            part_s=over(part_s, np.broadcast_to(num, part_s.shape)),
            waiting_share=waiting,
            rank_part_s=self._by_rank.values.sum(axis=0).reshape(-1, len(PARTS)),
            num_steps=self.num_steps,
        )
