"""Proportional control on step times, after Tyagi and Sharma."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray

from ..._types import Cluster, Decision, FloatArray, IntArray, StepTimings, check_fields
from ...exceptions import invalid
from ...solve._allocate import apportion
from .._base import AbstractPolicy, check_one_each, equal_split, with_floor
from ._moves import see

EARLY_BAND = 1.75
"""Width of the dead-band on the first step after a resize, in dead-bands."""
JUDGED_AFTER = 3
"""Steps at new sizes after which a fall of throughput is put down to them."""


@final
@dataclass(frozen=True, slots=True)
class DynamicBatching(AbstractPolicy[dict[str, Any]]):
    r"""Batch sizes proportional to throughput at the sizes in force, with a dead-band.

    $b_r \leftarrow B \, X_r / \sum_q X_q$ with $X_r = b_r / \mu_r$, and $\mu_r$ the moving average
    of $t_r$ over the steps since the last resize. This is the paper's $b_r \bar\mu / \mu_r$,
    renormalised. All workers are resized once the largest $|\Delta b_r| / b_r$ is past
    ``dead_band``, otherwise none.

    Exact in one round where times are proportional to batches. A fixed cost takes two or three
    rounds: $t = 5 + c\,b$ with $c = (1, 1, 5)$ and $B = 96$ ends at (44, 43, 9). Fast after a
    change; on a restless machine every resize follows noise of the last few steps. Of a worker
    that is mostly fixed cost the dead-band may hide a gain.

    Left out, as mistakes of the paper: initial sizes that add up to one worker's batch; gradient
    weights divided by $K$ twice; sizes that equalise times but not their sum (96 becomes 158); a
    dead-band on the signed change, which never fires for one straggler among many; prose asking
    that all workers change; a cap from a single reading, kept for ever.

    Chosen here, as the paper does not say: ``smoothing``, and a plain mean until that many steps
    are in; the dead-band is $1.75 / \sqrt n$ times as wide on the $n$-th step after a resize while
    that is more than 1, or jitter of 3 % would never let 8 workers settle; the learned cap
    (a worker's throughput fell as its batch grew, so the smaller size becomes its largest) takes
    a fall past ``cap_fall`` in the best of three steps, or twice in a row, and expires after
    ``cap_steps``; no worker falls to zero while there are samples for all.

    Args:
        dead_band: largest relative change that is ignored, in [0, 1).
        smoothing: weight of the newest step, in (0, 1].
        speeds: relative speeds guessed beforehand, one per rank, for the first split (the
            paper's static start, by cores or FLOPS). None starts equal.
        cap_fall: relative fall of throughput that caps a worker, in (0, 1].
        cap_steps: steps that a cap holds, at least 0; 0 learns no caps.

    Raises:
        ValueError: an argument is out of range, or ``speeds`` does not suit the cluster.

    References:
        S. Tyagi and P. Sharma, ACSOS 2020, arXiv 2305.12213: the update and the dead-band of its
        proportional controller.
    """

    name: ClassVar[str] = "dynamic-batching"

    dead_band: float = 0.05
    smoothing: float = 0.1
    speeds: tuple[float, ...] | None = None
    cap_fall: float = 0.2
    cap_steps: int = 100

    def __post_init__(self) -> None:
        check_fields(
            self,
            dead_band=("in [0, 1)", "0 is none."),
            smoothing=("in (0, 1]", "1 keeps no memory, less keeps more."),
            cap_fall=("in (0, 1]", "0.2 takes a fall by a fifth."),
            cap_steps=("at least 0", "0 is no caps."),
        )
        valid = all(0 < speed < math.inf for speed in self.speeds or ())
        if self.speeds is not None and not (self.speeds and valid):
            rule, remedy = "be finite and positive", "Only ratios matter."
            raise invalid("DynamicBatching(speeds=...)", rule, self.speeds, remedy)

    def init(self, cluster: Cluster) -> Decision[dict[str, Any]]:
        world_size = cluster.world_size
        held, reason = equal_split(cluster), "equal: nothing measured yet"
        if self.speeds is not None:
            check_one_each("DynamicBatching(speeds=...)", self.speeds, world_size)
            held = apportion(np.array(self.speeds, np.float64), cluster)
            reason = "static: in proportion to the speeds given"
        state = {
            "held": held,
            "waited": 0,
            "mean_s": np.zeros(world_size),
            "least_s": np.full(world_size, np.inf),
            "num_steps": 0,
            "previous": held,  # sizes before the last resize, and samples/s at them
            "previous_speed": np.zeros(world_size),
            "fell_before": np.zeros(world_size, np.bool_),
            "cap": np.zeros(world_size, np.int64),
            "cap_left": np.zeros(world_size, np.int64),
        }
        return Decision(held, state, reason)

    def update(
        self, cluster: Cluster, timings: StepTimings, state: dict[str, Any]
    ) -> Decision[dict[str, Any]]:
        state, is_new, is_measured = see(state, cluster=cluster, timings=timings)
        batch_size = state["held"]
        if is_new:
            state = _resized(state, batch_size, np.zeros(len(batch_size)))
        if not is_measured:
            return Decision(batch_size, state, "held: waiting for a step with these sizes")

        state = self._average(state, timings)
        speed = _speed(batch_size, state["mean_s"])
        grew, fell = self._grew_and_fell(state, batch_size)
        state = self._learn_caps(state, fell)
        bounds = _capped(with_floor(cluster), state)
        share = speed / speed.sum() * cluster.global_batch_size
        target = np.clip(share, bounds.min_batch_size, bounds.max_batch_size)
        change = float((abs(target - batch_size) / np.maximum(batch_size, 1)).max())
        band = self.dead_band * max(1.0, EARLY_BAND / math.sqrt(state["num_steps"]))

        wanted = apportion(speed, bounds)
        if change <= band or np.array_equal(wanted, batch_size):
            reason = f"held: change of {change:.1%} within {band:.1%}, or below one granule"
            return Decision(batch_size, state, reason)
        rank = int(np.argmin(speed))
        reason = f"resized by {change:.1%}: rank {rank} slowest at {speed[rank]:.3g} samples/s"
        fell_before = np.where(grew, fell, state["fell_before"])
        state = {**_resized(state, wanted, speed), "fell_before": fell_before}
        return Decision(wanted, state, reason)

    def _average(self, state: dict[str, Any], timings: StepTimings) -> dict[str, Any]:
        num_steps = state["num_steps"] + 1
        weight = max(1 / num_steps, self.smoothing)
        step_s = np.where(timings.batch_size > 0, timings.compute_s, 0.0)
        mean_s = state["mean_s"] + weight * (step_s - state["mean_s"])
        least_s = np.minimum(state["least_s"], step_s)
        return {**state, "num_steps": num_steps, "mean_s": mean_s, "least_s": least_s}

    def _grew_and_fell(
        self, state: dict[str, Any], batch_size: IntArray
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Say who got more samples by the last resize, and who of them lost throughput."""
        grew = batch_size > state["previous"]
        # By the best step since: pauses make single steps slow, a size too large makes all.
        enough_s = batch_size / np.maximum((1 - self.cap_fall) * state["previous_speed"], 1e-300)
        return grew, grew & (state["least_s"] > enough_s) & (state["previous_speed"] > 0)

    def _learn_caps(self, state: dict[str, Any], fell: NDArray[np.bool_]) -> dict[str, Any]:
        """Cap workers that fell for sure at their smaller size; let older caps expire."""
        sure = fell & state["fell_before"]
        if state["num_steps"] == JUDGED_AFTER:
            sure = fell
        if state["num_steps"] > JUDGED_AFTER or not self.cap_steps:
            sure = np.zeros_like(fell)
        left = np.maximum(state["cap_left"] - 1, 0)
        return {
            **state,
            "cap": np.where(sure, state["previous"], state["cap"]),
            "cap_left": np.where(sure, self.cap_steps, left),
        }


def _speed(batch_size: IntArray, mean_s: FloatArray) -> FloatArray:
    """Return samples/s; a worker without samples counts as slow as the slowest."""
    ran = batch_size > 0
    speed = np.divide(batch_size, mean_s, out=np.zeros(len(mean_s)), where=ran)
    return np.where(ran, speed, speed[ran].min())


def _resized(state: dict[str, Any], batch_size: IntArray, speed: FloatArray) -> dict[str, Any]:
    """Return the state of a rule that has just changed the sizes to ``batch_size``."""
    return {
        **state,
        "held": batch_size,
        "mean_s": np.zeros(len(batch_size)),
        "least_s": np.full(len(batch_size), np.inf),
        "num_steps": 0,
        "previous": state["held"],
        "previous_speed": speed,
    }


def _capped(cluster: Cluster, state: dict[str, Any]) -> Cluster:
    """Return ``cluster`` with the learned caps, or itself if they leave too little room."""
    learned = np.maximum(state["cap"], cluster.min_batch_size)
    most = np.where(state["cap_left"] > 0, learned, cluster.max_batch_size)
    most = np.minimum(most, cluster.max_batch_size)
    most = np.where(
        most < cluster.global_batch_size, most // cluster.granularity * cluster.granularity, most
    )
    if most.sum() < cluster.global_batch_size:
        return cluster
    return replace(cluster, max_batch_size=most)
