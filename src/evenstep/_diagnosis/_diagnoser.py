"""Takes in what all ranks say of their steps, and answers who waits for whom, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from .._types import FloatArray
from ..events import WaitingDiagnosed
from ._account import HostClues, Machines, Phase, StepClues
from ._critical_path import FrontierSums, RankSteps, frontier
from ._slow_links import LinkBooks, slow_links
from ._trend import Course, levels_of
from ._verdict import Facts, verdict

_KEPT = 0.98  # of the sums, at each addition: lengths change their meaning with the data
_FEWEST = 8.0  # steps
_LEAST_R2 = 0.3


@final
class SizeFit:
    """Least squares of own computing on size within each rank, from running sums.

    Within, so that a slower rank with fewer samples is not taken for one to which samples come for
    nothing. A rank whose own steps show nothing has the median slope of the others.

    Args:
        world_size: number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._sums = np.zeros((6, world_size))
        self._origin: FloatArray | None = None  # of the sums, as squares of large numbers cancel

    def add(self, size: FloatArray, computed: FloatArray) -> None:
        """Take in some steps, both ``(num_steps, world_size)``."""
        if not size.any():
            return
        if self._origin is None:
            self._origin = np.stack([size.mean(axis=0), computed.mean(axis=0)])
        x, y = size - self._origin[0], computed - self._origin[1]
        parts = [np.ones_like(x), x, y, x * x, x * y, y * y]
        self._sums = _KEPT * self._sums + np.stack([part.sum(axis=0) for part in parts])

    def us_per_size(self) -> FloatArray:
        """Return the slopes, ``(world_size,)``; 0 where size explains too little."""
        number, x, y, xx, xy, yy = self._sums
        count = np.maximum(number, 1.0)
        of_size, both, of_time = xx - x * x / count, xy - x * y / count, yy - y * y / count
        known = (number >= _FEWEST) & (of_size > 1e-9) & (both > 0)
        slope = np.where(known, both, 0.0) / np.where(known, of_size, 1.0)
        known &= both * slope >= _LEAST_R2 * of_time
        if 2 * known.sum() < len(known):
            return np.zeros(len(known))
        return np.where(known, slope, np.median(slope[known]))


_MOST_OPEN = 256  # steps that wait to be summed up; of very many ranks fewer
_MOST_TIMES = 1 << 15  # steps times ranks that do
_SETTLING = 3  # steps: buckets, allocators and caches are set up, on some ranks for longer


@final
class Diagnoser:
    """Finds who the others wait for, and why, in constant memory.

    Steps are kept until a diagnosis is asked for, or there are many; then they are summed up, all
    at once. To take in a step costs next to nothing.

    Args:
        world_size: number of ranks.
        window_s: how many of the newest seconds ``diagnose`` looks at: between half of them and
            all.
        parts_stay: whether each rank keeps its part of the batch. Else a rank that takes longer
            than before may only have more samples, and earlier times say nothing.
    """

    def __init__(self, world_size: int, *, window_s: float = 60.0, parts_stay: bool = True) -> None:
        self._world_size, self._parts_stay = world_size, parts_stay
        self._half_us = window_s / 2 * 1e6 * world_size
        self._most_open = max(2, min(_MOST_OPEN, _MOST_TIMES // world_size))
        self._none = [StepClues()] * world_size
        self._open: list[Sequence[Sequence[int]]] = []  # the first was summed up before
        self._clues: list[Sequence[StepClues]] = []
        self._counts: list[int] = []
        self._step = -1
        self._num_settling = _SETTLING
        self._run = self._older = self._newer = FrontierSums.empty(world_size)
        self._sizes = SizeFit(world_size)
        self._course, self._exchange = Course(world_size), Course(1)
        self._computing = Course(2 * world_size)  # of every rank forward and backward
        self._machines = Machines(world_size, window_s)
        self._links = LinkBooks(world_size, window_s)

    def add(
        self,
        step: int,
        spent_us: Sequence[Sequence[int]],
        clues: Sequence[StepClues] | None = None,
        *,
        num_steps: int = 1,
    ) -> None:
        """Take in a step that all ranks have reported. Steps come in order; some may be missing.

        Short steps may come several in a row as one, with the sums of their times. What changes
        from one of them to the next is not seen then.

        A step lasts from its hand-out to the next one's, so what leads to a batch is in the step
        before it. The first three steps are left out, and one after a gap: they only say what leads
        to the next.

        Args:
            step: its number; of several, the newest.
            spent_us: microseconds by rank and ``Phase``, as ``time_by_phase`` gives them.
            clues: of each rank; None where there are none.
            num_steps: how many steps it is.
        """
        if step - num_steps != self._step or self._num_settling:
            self._sum_up()
            self._open, self._clues, self._counts = [], [], []
            self._num_settling = max(0, self._num_settling - 1)
        self._step = step
        self._open.append(spent_us)
        self._clues.append(self._none if clues is None else clues)
        self._counts.append(num_steps)
        if len(self._open) > self._most_open:
            self._sum_up()

    def add_host(self, rank: int, clues: HostClues) -> None:
        """Take in what a rank's process and machine did since the look before."""
        self._machines.add(rank, clues)
        self._links.add(rank, clues)

    def diagnose(self, *, whole_run: bool = False) -> WaitingDiagnosed:
        """Return who the others wait for, and why, in the newest seconds or in the whole run."""
        self._sum_up()
        sums = self._run if whole_run else self._older + self._newer
        rows, num_newest = self._computing.rows(sums.num_rows)
        rows = rows.reshape(len(rows), self._world_size, 2)
        links = self._links.links(whole_run=whole_run)
        facts = Facts(
            sums,
            self._machines.rates(whole_run=whole_run),
            links,
            slow_links(links, sums.exposed / max(sums.wall, 1.0)),
            self._exchange.jump(),
            levels_of(rows, num_newest, looks_back=self._parts_stay),
            self._course.cause,
        )
        return verdict(facts, self._step)

    def _sum_up(self) -> None:
        """Add up the steps that are open; the last one leads to the next, and stays."""
        if len(self._open) < 2:
            return
        steps = self._opened()
        for kept in (self._open, self._clues, self._counts):
            del kept[:-1]
        computed = steps.spent[:, :, [Phase.FORWARD, Phase.BACKWARD]].sum(axis=2)
        computed -= steps.collected + steps.compiled
        count = steps.counts[1:, None]
        self._sizes.add(steps.size[1:] / count, computed[1:] / count)
        sums, slower, stages, exposed_us = frontier(steps, self._sizes.us_per_size())
        self._course.add(slower)
        self._computing.add(stages.reshape(len(stages), -1))
        self._exchange.add(exposed_us[:, None])
        self._run += sums
        if self._newer.wall >= self._half_us:
            self._older, self._newer = self._newer, sums
        else:
            self._newer += sums

    def _opened(self) -> RankSteps:
        spent, counts = np.array(self._open, np.float64), np.array(self._counts, np.float64)
        if all(clues is self._none for clues in self._clues):
            return RankSteps(spent, counts, *np.zeros((3, *spent.shape[:2])))
        clues = np.array(
            [[(one.gc_us, one.compile_us, one.size) for one in step] for step in self._clues],
            np.float64,
        )
        return RankSteps(spent, counts, *np.moveaxis(clues, 2, 0))
