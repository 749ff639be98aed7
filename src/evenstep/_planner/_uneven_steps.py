"""Steps of different numbers of samples, as a policy sees them: as if each were the planned one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from .._types import FloatArray
from ._report import Report

_WEIGHT = 0.1  # of the newest step, in what a sample usually takes


@final
class UnevenSteps:
    r"""Brings the times of steps that differ in their samples to the planned sizes.

    Where rank $r$ took $t_r$ for $n_r$ samples, and $b_r$ are planned, the policy is shown $b_r$
    samples in $b_r t_r / (n_r h)$ seconds. $h$ is how heavy the samples of this step were: the
    median over ranks of $t_r / n_r$ over what that usually is, by a moving geometric mean. A plan
    is applied to every step in proportion, so only how ranks compare within one is of use: a batch
    of a thousand short samples and one of ten long ones say the same of two ranks.

    Right where a step takes about as long as its samples: fixed costs are seen as a part of what
    samples cost. In small steps that is most of it, so those of less than a quarter of the planned
    samples are left out; and those in which a rank has none.
    """

    def __init__(self) -> None:
        self._usual: FloatArray | None = None  # log of a sample's seconds, ``(world_size,)``

    def show(
        self, reports: Sequence[Report], sizes: Sequence[int], *, learn: bool
    ) -> Sequence[Report]:
        """Return the reports of a step at the planned ``sizes``.

        None at all where the step says too little.

        Args:
            reports: one from each rank, in order, that can be planned by.
            sizes: as planned for the step, ``(world_size,)``.
            learn: whether the step says what samples usually take; one that warms up does not.
        """
        counts = np.array([report.batch_size for report in reports])
        planned = np.array(sizes)
        ran = planned > 0
        if ((counts > 0) != ran).any() or 4 * counts.sum() < planned.sum():
            return ()
        took_s = np.array([report.compute_s for report in reports])
        each = np.log(np.where(ran, took_s / np.maximum(counts, 1), np.nan))
        usual = each if self._usual is None else np.where(np.isnan(self._usual), each, self._usual)
        heavy = float(np.nanmedian(each - usual))
        if learn:
            self._usual = np.where(ran, usual + _WEIGHT * (each - usual), usual)
        as_planned_s = planned * np.exp(each - heavy)
        total = int(planned.sum())
        return [
            report._replace(
                batch_size=size, global_num_samples=total, compute_s=float(seconds) if size else 0.0
            )
            for report, size, seconds in zip(reports, sizes, as_planned_s, strict=True)
        ]
