"""What a recorded run shows of its workers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._telemetry._event_lines import WARM_UP, Recorded
from .._telemetry._line import whole_steps
from .._types import FloatArray, IntArray
from ..events import StepMeasured
from ..exceptions import invalid
from ..prediction._affine_filter import AffineFilter
from ..timemodels._curves import AffineTime


@dataclass(frozen=True, slots=True, eq=False)
class RunTimes:
    """What a recorded run shows of its workers, all arrays ``(world_size,)``.

    Attributes:
        times: fixed cost and cost per sample at the end of the run, as ``AffineFilter`` has them.
        speed_error: relative standard error of the cost per sample, and so of the speed.
        time_error: the same of the time that a worker takes for its last batch.
        is_line_known: whether a worker was seen at two sizes or more. Where not, all of its time
            is taken for cost per sample.
        num_steps: measured steps that the estimates come from.
        step_s: median seconds of the slowest worker's computing, as it was.
        global_batch_size: samples per step.
        ranks: whose times they are, in this order.
        names: host and device of every rank, empty where they were not recorded.
        max_batch_size: the caps last known; None if none was, or if they bound one forward only.
        overhead_s: median seconds of a step past its slowest worker's computing.
        saved_by_cost: of steps that were assigned by cost, the part of computing with equal counts
            that speed alone, length alone and both together save; None if there was none.
        untimed: ranks beside them that have none.
    """

    times: AffineTime
    speed_error: FloatArray
    time_error: FloatArray
    is_line_known: NDArray[np.bool_]
    num_steps: int
    step_s: float
    global_batch_size: int
    ranks: tuple[int, ...]
    names: tuple[str, ...] = ()
    max_batch_size: IntArray | None = None
    overhead_s: float = 0.0
    saved_by_cost: tuple[float, ...] | None = None
    untimed: tuple[int, ...] = ()

    @classmethod
    def of(cls, sizes: IntArray, seconds: FloatArray, **known: Any) -> RunTimes | None:
        """Return what steps show; None where a worker has no samples in any.

        Args:
            sizes: samples of each step and worker, ``(num_steps, world_size)``.
            seconds: that it computed, likewise.
            known: the other attributes.
        """
        estimator = AffineFilter()
        state = estimator.after(sizes, seconds)
        times = estimator.times(state)
        if times is None:
            return None
        return cls(
            times,
            estimator.slope_uncertainty(state),
            estimator.uncertainty(state),
            sizes.max(axis=0) > np.where(sizes > 0, sizes, sizes.max()).min(axis=0),
            **known,
        )


def read_run(path: str | Path) -> RunTimes:
    """Return what the workers of a recorded run need for any batch.

    From the last start in the file on, if training began more than once: earlier workers may
    have been others. The first step is passed over where there are more; of more than 20,000,
    the newest count. Damaged lines are left out, with a warning of the logger ``evenstep``.

    Args:
        path: a run's folder, as given to ``Runtime(run_dir=...)``, or its ``events.jsonl``.

    Raises:
        ValueError: there is no measured step.
        OSError: the file cannot be read.
    """
    run = Recorded.of(path, caller="read_run")
    steps = [step for _, step in run.steps]
    shown = steps[WARM_UP:] or steps
    sizes = np.array([step.batch_size for step in shown], np.int64)
    total, start = run.global_batch_size, run.start
    named = () if start is None else zip(start.hosts, start.devices, strict=True)
    found = RunTimes.of(
        sizes,
        np.array([step.compute_s for step in shown], np.float64),
        num_steps=sum(step.num_steps for step in shown),
        step_s=float(np.median([step.makespan_s for step in shown])),
        global_batch_size=total,
        ranks=tuple(range(sizes.shape[1])),
        names=tuple(f"{host} {device}" for host, device in named),
        max_batch_size=_caps(run.caps, sizes.shape[1], total),
        overhead_s=_overhead_s(steps),
        saved_by_cost=_saved_by_cost(shown),
    )
    if found is None:
        rule = "measure every worker at least once"
        got = f"nothing of rank {np.argmin((sizes > 0).sum(axis=0))} in {run.file}"
        remedy = "Record a run in which each has samples."
        raise invalid("read_run(path=...)", rule, got, remedy)
    return found


def _saved_by_cost(steps: Iterable[StepMeasured]) -> tuple[float, ...] | None:
    names = ("equal_split_s", "speed_split_s", "cost_split_s", "makespan_s")
    rows = [[getattr(step, name) for name in names] for step in steps]
    known = np.array([row for row in rows if None not in row], np.float64)
    if not len(known):
        return None
    equal_s, *other_s = known.mean(axis=0).tolist()
    return tuple(1 - one_s / equal_s for one_s in other_s)


def _overhead_s(steps: Iterable[StepMeasured]) -> float:
    """Return the median of what a step took past its computing."""
    past_s = [wall_s - step.makespan_s for step, wall_s in whole_steps(steps)]
    return max(float(np.median(past_s)), 0.0) if past_s else 0.0


def _caps(caps: dict[int, int], world_size: int, total: int) -> IntArray | None:
    if not caps:
        return None
    return np.array([caps.get(rank, total) for rank in range(world_size)], np.int64)
