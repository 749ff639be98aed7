"""What a step cost, as a fact, and what other splits would have, by the times fitted so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .._types import Cluster, FloatArray, StepTimings
from ..events import StepMeasured, WorkerUnhelpful
from ..policies._base import READING_S
from ..prediction._affine_filter import AffineFilter
from ..solve._allocate import allocate, apportion, makespan_s
from ..timemodels._curves import AffineTime
from ._plan import LONG_STEP, Plan, Reading, Readings, Report

_WORTH_A_WORD = 0.02
_FITS = 8  # for which the splits of one count: with 256 ranks they take a fifth of rank 0's time


_Splits = tuple[Cluster, AffineTime, FloatArray, FloatArray]
"""A cluster, a fit, and what that says of the equal split and of the best, ``(world_size,)``."""


class WhatIf:
    """Follows every worker's affine time, whatever the policy, and prices splits by it.

    Attributes:
        state: what the filter knows, to be restored.
    """

    def __init__(self, world_size: int) -> None:
        self._filter = AffineFilter()
        self.state = self._filter.init(world_size)
        self._readings = Readings[Callable[[], StepTimings]](READING_S)
        self._splits: _Splits | None = None  # by a recent fit
        self._num_fits = 0

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from ``state``, of as many workers."""
        self.state, self._splits = state, None

    def known(self) -> tuple[AffineTime, FloatArray] | None:
        """Return every worker's time and its relative noise; None until all are measured."""
        times = self._filter.times(self.state)
        if times is None:
            return None
        return times, self._filter.noise(self.state)

    def observe(
        self, timings: StepTimings, *, is_tail: bool = False, claimed: bool = False
    ) -> None:
        """Learn from one step; from short ones together, or from the first at once.

        Of steps whose sizes claims have changed, the newest one stands for all.

        Args:
            timings: of all workers.
            is_tail: whether it is the short last step of an epoch, which no other is like: it is
                learnt from by itself, or not at all where single steps say little.
            claimed: whether claims have changed its sizes.
        """
        sizes = None if claimed else timings.batch_size.tobytes()
        took_s = float(timings.compute_s[timings.batch_size > 0].max())
        if is_tail and took_s < LONG_STEP * READING_S:
            return
        at_once = is_tail or not (self.state["num_steps"] > 0).all()
        steps = self._readings.add(sizes, took_s, lambda: timings, at_once=at_once)
        if not steps:
            return
        typical = Reading(steps[-1:] if claimed else steps).timings
        self.state = self._filter.update(
            self.state, typical.batch_size, typical.compute_s, num_steps=typical.num_steps
        )
        self._num_fits += 1
        if self._num_fits <= 2 * _FITS or self._num_fits % _FITS == 0:
            self._splits = None

    def costs(self, cluster: Cluster, timings: StepTimings) -> tuple[float, float] | None:
        r"""Return what a step would have cost with the equal split, and with the best.

        Seconds of the slowest worker; None until all are measured.

        $\max_r \tau_r \, t_r(b'_r) / t_r(b_r)$, with $\tau_r$ what was measured and $t_r$ the fit:
        whatever befell a worker in this step would have befallen it at any size.

        Args:
            cluster: whose splits are compared.
            timings: the step as it ran.
        """
        if self._splits is None or self._splits[0] is not cluster:
            times = self._filter.times(self.state)
            if times is None:
                return None
            equal, best = apportion(np.ones(cluster.world_size), cluster), allocate(times, cluster)
            self._splits = cluster, times, times.seconds(equal), times.seconds(best)
        _, times, equal_s, best_s = self._splits  # of the newest fit or, later, of one before
        ran = timings.batch_size > 0
        fitted_s = np.where(ran, times.seconds(timings.batch_size), 1.0)
        luck = np.where(ran, timings.compute_s, 1.0) / np.maximum(fitted_s, 1e-12)
        return float((luck * equal_s).max()), float((luck * best_s).max())

    def burden(self, step: int, cluster: Cluster) -> WorkerUnhelpful | None:
        """Return the worker that costs more than it brings; None if there is none.

        It needs longer for the fewest samples it can have than the others need for all; of several
        it is the slowest. Looked for once all are measured; a fiftieth is no reason yet. What the
        others need for more samples than they had has to be known: to their times comes twice the
        standard error of the cost of these samples. Equal workers that always had equal batches
        would otherwise look as if one of them were enough, where noise hides that cost.

        Args:
            step: the newest one, for the fact.
            cluster: what is planned for.
        """
        times = self._filter.times(self.state)
        if times is None:
            return None
        free = replace(cluster, min_batch_size=np.zeros_like(cluster.min_batch_size))
        # The solver itself leaves out who does not help.
        best = allocate(times, free)
        with_s, best_s = makespan_s(times, allocate(times, cluster)), times.seconds(best)
        more = np.maximum(best - self.state["batch_size"], 0)
        error_s = times.slope_s * self._filter.slope_uncertainty(self.state) * more
        surely_s = float((best_s + 2 * error_s)[best > 0].max())
        if best.all() or surely_s > (1 - _WORTH_A_WORD) * with_s:
            return None
        idle_s = np.where(best == 0, times.seconds(np.maximum(cluster.min_batch_size, 1)), 0.0)
        without_s = float(best_s[best > 0].max())
        return WorkerUnhelpful(step, int(np.argmax(idle_s)), with_s, without_s)


def measured(
    reports: Sequence[Report],
    plan: Plan,
    timings: StepTimings,
    costs: Mapping[str, float],
) -> StepMeasured:
    """Return what a step cost.

    Args:
        reports: one from each rank, in order, all about the same step.
        plan: the one it ran under.
        timings: what they say.
        costs: what other splits would have cost, as far as that is known, by field of the fact.
    """
    compute_s = np.where(timings.batch_size > 0, timings.compute_s, 0.0)
    makespan_s = float(compute_s.max())
    idle_s = makespan_s - compute_s
    return StepMeasured(
        step=reports[0].step,
        plan_epoch=plan.epoch,
        batch_size=tuple(timings.batch_size.tolist()),
        compute_s=tuple(compute_s.tolist()),
        data_s=tuple(timings.data_s.tolist()),
        idle_s=tuple(idle_s.tolist()),
        makespan_s=makespan_s,
        idle_share=float(idle_s.sum() / (len(reports) * makespan_s)),
        equal_split_s=costs.get("equal_split_s"),
        best_split_s=costs.get("best_split_s"),
        wall_s=reports[0].wall_s,
        speed_split_s=costs.get("speed_split_s"),
        cost_split_s=costs.get("cost_split_s"),
    )
