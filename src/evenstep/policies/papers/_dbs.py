"""Shares corrected once per epoch by the time they took, after Ye et al."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from ..._types import Cluster, Decision, IntArray, StepTimings, check_fields
from ...solve._allocate import apportion
from .._base import AbstractPolicy, equal_split, refit, with_floor


@final
@dataclass(frozen=True, slots=True)
class Dbs(AbstractPolicy[dict[str, Any]]):
    r"""Shares of the data corrected once per epoch by the time they took.

    After ``num_steps`` steps, with $d_r$ the share of their samples that worker $r$ computed and
    $t_r$ the seconds it computed for them,

    $d_r \leftarrow \dfrac{d_r / t_r}{\sum_q d_q / t_q}, \quad b_r = d_r B$,

    rounded by largest remainder. Batch and part of the data follow the same share, so all workers
    take equally many steps.

    Right where workers differ for good: if times are proportional to batches, one epoch is
    enough, and a whole epoch's mean is hardly touched by noise. A fixed cost, a fraction $f$ of
    the step, leaves a fraction $f$ of the error after each. Wrong where load changes within an
    epoch, of which it sees the mean, one epoch late.

    Left out, as mistakes of the paper's code: it rounds up remainders from one half on and all
    others down, so that sizes miss $B$ in 12 to 27 % of draws; and it lets workers take unequal
    numbers of steps, at which they deadlock.

    Chosen here, as the paper does not say: bounds are kept, with a smallest batch of one granule,
    because a share of 0 would stay 0; a worker without samples in a whole epoch keeps the speed
    it last had, and counts as the mean of the others if it never had any.

    Args:
        num_steps: optimizer steps in an epoch, a short last one left out, at least 1. A policy
            does not see where epochs end, nor short steps, nor the first of a run. The default is
            about the papers' 50,000 samples at a global batch of 512.

    Raises:
        ValueError: ``num_steps`` is below 1.

    References:
        Q. Ye et al., "DBS: Dynamic batch size for distributed deep neural network training",
        arXiv 2007.11831, 2020: the update of the shares.
    """

    name: ClassVar[str] = "dbs"

    num_steps: int = 98

    def __post_init__(self) -> None:
        check_fields(self, num_steps=("at least 1", "Give `len(loader)`, less a short step."))

    def init(self, cluster: Cluster) -> Decision[dict[str, Any]]:
        held = equal_split(cluster)
        state = {
            "held": held,
            "num_steps": 0,
            "num_samples": np.zeros(cluster.world_size, np.int64),  # of the epoch under way
            "compute_s": np.zeros(cluster.world_size),
            "speed": np.zeros(cluster.world_size),  # 0 where it is not known
        }
        return Decision(held, state, "equal: the first epoch")

    def update(
        self, cluster: Cluster, timings: StepTimings, state: dict[str, Any]
    ) -> Decision[dict[str, Any]]:
        held, ran = refit(state["held"], cluster), timings.batch_size > 0
        num_steps = timings.num_steps
        state = {
            **state,
            "held": held,
            "num_steps": state["num_steps"] + num_steps,
            "num_samples": state["num_samples"] + num_steps * timings.batch_size,
            "compute_s": state["compute_s"] + num_steps * np.where(ran, timings.compute_s, 0.0),
        }
        if state["num_steps"] < self.num_steps:
            return Decision(held, state, f"held: step {state['num_steps']} of {self.num_steps}")
        return self._next_epoch(cluster, state)

    def _next_epoch(self, cluster: Cluster, state: dict[str, Any]) -> Decision[dict[str, Any]]:
        """Return the decision at the end of an epoch."""
        num_samples, compute_s = state["num_samples"], state["compute_s"]
        speed = np.divide(num_samples, compute_s, out=state["speed"].copy(), where=num_samples > 0)
        shares = np.where(speed > 0, speed, speed[speed > 0].mean())
        wanted: IntArray = apportion(shares, with_floor(cluster))
        slow = int(np.argmax(compute_s))
        reason = f"next epoch: rank {slow} computed longest, {compute_s[slow]:.3g} s"
        state = {
            "held": wanted,
            "num_steps": 0,
            "num_samples": np.zeros_like(num_samples),
            "compute_s": np.zeros_like(compute_s),
            "speed": speed,
        }
        return Decision(wanted, state, reason)
