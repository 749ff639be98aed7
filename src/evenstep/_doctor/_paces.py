"""Timed steps of all ranks, as the times that advice is made from."""

from __future__ import annotations

import numpy as np

from ..advice._recorded_run import RunTimes
from ..exceptions import invalid
from ..prediction._affine_filter import AffineFilter
from ._checkup_facts import Checkup, Pace


def usable(checkup: Checkup) -> tuple[Pace, ...]:
    """Return the paces that have times."""
    return tuple(pace for pace in checkup.paces if pace.seconds)


def run_times(checkup: Checkup) -> RunTimes:
    """Return what timed steps tell, in the form that a recorded run has.

    Ranks without times are left out: workers are those of ``usable``, in this order.

    Raises:
        ValueError: no rank has times.
    """
    paces = usable(checkup)
    if not paces:
        remedy = "Run `evenstep doctor` again, and see its findings."
        raise invalid("Checkup(paces=...)", "hold the times of a rank", "none", remedy)
    ranks = tuple(pace.rank for pace in paces)
    num_steps = max(len(pace.seconds) for pace in paces)
    sizes = np.zeros((num_steps, len(paces)), np.int64)
    seconds = np.ones((num_steps, len(paces)))
    for at, pace in enumerate(paces):
        sizes[: len(pace.sizes), at] = pace.sizes
        seconds[: len(pace.seconds), at] = pace.seconds
    estimator = AffineFilter()
    state = estimator.after(sizes, seconds)
    times = estimator.times(state)
    assert times is not None  # each has a step
    slowest = max(float(np.median(pace.seconds)) for pace in paces)
    return RunTimes(
        times=times,
        global_batch_size=max(checkup.global_batch_size, len(paces)),
        names=tuple(_name(checkup, rank) for rank in ranks),
        max_batch_size=None,
        overhead_s=0.0,
        noise=estimator.noise(state),
        speed_error=estimator.slope_uncertainty(state),
        time_error=estimator.uncertainty(state),
        is_line_known=np.array([len(set(pace.sizes)) > 1 for pace in paces]),
        num_steps=num_steps,
        step_s=slowest,
        by_cost=None,
        ranks=ranks,
        untimed=tuple(rank for rank in range(checkup.world_size) if rank not in ranks),
    )


def _name(checkup: Checkup, rank: int) -> str:
    facts = checkup.of(rank)
    return f"{facts.host} {facts.device.name or facts.device.kind}"
