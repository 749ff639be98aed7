"""Whether a measurement belongs to the split that a rule decided last."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..._types import Cluster, IntArray, StepTimings
from .._splits import is_feasible, refit

PATIENCE = 2
"""Steps under other sizes that are waited out: a device may report one or two steps late."""


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """The split in force, as far as a rule can tell.

    Rules that correct the sizes they measured go wrong when a measurement comes from other
    sizes: a move would be made twice. Such steps are left out. After more than ``PATIENCE`` of
    them in a row those sizes are evidently kept on purpose, by a wrapper perhaps, and they count.

    Attributes:
        batch_size: local batch sizes, ``(world_size,)``, feasible.
        waited: full steps in a row that were measured under other sizes.
        measured: whether the newest step was computed with these sizes.
        is_new: whether the sizes are other than those handed in.
    """

    batch_size: IntArray
    waited: int
    measured: bool
    is_new: bool


def see(held: IntArray, waited: int, *, cluster: Cluster, timings: StepTimings) -> Held:
    """Return what is in force, given the split decided last and the newest step."""
    fitted = refit(held, cluster)
    is_new = fitted is not held
    if np.array_equal(timings.batch_size, fitted):
        return Held(fitted, 0, measured=True, is_new=is_new)
    if timings.batch_size.sum() != cluster.global_batch_size:  # the short last step of an epoch
        return Held(fitted, waited, measured=False, is_new=is_new)
    if waited < PATIENCE or not is_feasible(timings.batch_size, cluster):
        return Held(fitted, waited + 1, measured=False, is_new=is_new)
    return Held(timings.batch_size.copy(), 0, measured=True, is_new=True)
