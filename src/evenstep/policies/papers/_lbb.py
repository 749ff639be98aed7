"""Fine and rapid correction by fitted lines, after Yao et al."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from ..._types import Cluster, Decision, FloatArray, IntArray, StepTimings, check_fields
from ...exceptions import invalid
from ...solve._allocate import allocate, check_world
from ...timemodels import CubicTime
from ...timemodels._curves import AffineTime
from .._base import AbstractPolicy, check_one_each, equal_split
from ._moves import find_pair, moved, overshoots, see, spread


@final
@dataclass(frozen=True, slots=True)
class Lbb(AbstractPolicy[dict[str, Any]]):
    r"""One granule at a time while nearly balanced, all at once when not.

    The first split is equal or, with a ``profile``, the one that it makes fastest. Then, each step,
    the straggler effect $SE = (\max t - \min t) / \mathrm{mean}\,t$ decides:

    - $SE <$ ``fine``: nothing.
    - ``fine`` $\le SE <$ ``rapid``: the slowest worker gives one granule to the fastest.
    - $SE \ge$ ``rapid``: from this one step $T_r(b) = (t_r - p_r) / b_r \cdot b + p_r$ with the
      profiled fixed cost $p_r$, and $\min_b \max_r T_r(b_r)$, exactly. Then only fine moves for
      ``observation_steps`` steps.

    Right where fixed costs are known and changes are few: one rapid step ends at most a few
    percent from the best, and fine moves do the rest. Without fixed costs the rapid step
    overshoots wherever they matter. A fine move each step follows a drift of one granule per
    step at most, and every step's noise: with 3 % jitter batches wander by a few samples.

    Left out, as mistakes of the paper or its code: a profile that records the size that failed;
    a fine move that takes none and gives one, so that $B$ grows; balance declared below ``rapid``
    in the prose; $\max - \min$ as the objective where $\max$ is meant; weights by a nominal $B$
    that the rounded sizes miss; sizes below the bounds; slopes that fall to zero where $t \le p$
    ($p$ is cut to 90 % of $t$); the count of 30 balanced steps at which neither branch fires.

    Chosen here, as the paper does not say: the length of the observation window; no fine move
    that would leave the fastest slower than the slowest was. The dropping of workers is what
    ``min_batch_size=0`` allows; a dropped one keeps its last slope, and one never measured has
    the mean slope. Profiling itself is not part of the policy.

    Args:
        intercept_s: profiled fixed cost of a step in seconds, one per rank, finite and at least
            0. None takes times for proportional.
        fine: straggler effect from which fine moves are made, at least 0.
        rapid: straggler effect from which the lines are solved, above ``fine``.
        observation_steps: steps after a rapid one in which there is no other, at least 0.
        profile: every worker's cubic, such as ``CubicTime.fitted(profiles)``. The first split is
            solved from it, and its $p_0$ are the fixed costs where ``intercept_s`` gives none.

    Raises:
        ValueError: an argument is out of range, or ``intercept_s`` or ``profile`` does not suit
            the cluster.

    References:
        Yao et al., J. Supercomputing 80:12247, 2024, by its preprint: thresholds FT and RT.
    """

    name: ClassVar[str] = "lbb"

    intercept_s: tuple[float, ...] | None = None
    fine: float = 0.05
    rapid: float = 0.3
    observation_steps: int = 5
    profile: CubicTime | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.fine < self.rapid:
            rule, got = "satisfy 0 <= fine < rapid", f"{self.fine} and {self.rapid}"
            raise invalid("Lbb(fine=..., rapid=...)", rule, got, "The paper has 0.05 and 0.3.")
        check_fields(self, observation_steps=("at least 0", "0 allows a rapid step at every step."))
        costs = np.asarray(() if self.intercept_s is None else self.intercept_s, np.float64)
        if not (np.isfinite(costs) & (costs >= 0)).all():
            rule, remedy = "be finite and at least 0", "Cut a fitted cost off at 0."
            raise invalid("Lbb(intercept_s=...)", rule, self.intercept_s, remedy)

    def init(self, cluster: Cluster) -> Decision[dict[str, Any]]:
        if self.intercept_s is not None:
            check_one_each("Lbb(intercept_s=...)", self.intercept_s, cluster.world_size)
        held, reason = equal_split(cluster), "equal: nothing measured yet"
        if self.profile is not None:
            check_world("Lbb(profile=...)", self.profile, cluster)
            held = allocate(self.profile, cluster)
            reason = f"{self.profile.seconds(held).max():.3g} s by the profile"
        state = {"held": held, "waited": 0, "watch": 0, "slope_s": np.zeros(cluster.world_size)}
        return Decision(held, state, reason)

    def update(
        self, cluster: Cluster, timings: StepTimings, state: dict[str, Any]
    ) -> Decision[dict[str, Any]]:
        state, is_new, is_measured = see(state, cluster=cluster, timings=timings)
        batch_size = state["held"]
        if is_new:  # sizes from elsewhere: the last rapid step was not tried
            state = {**state, "watch": 0}
        if not is_measured:
            return Decision(batch_size, state, "held: waiting for a step with these sizes")

        step_s = np.where(batch_size > 0, timings.compute_s, 0.0)
        times = self._fit(batch_size, step_s, state["slope_s"])
        watch = state["watch"]
        state = {**state, "watch": max(watch - 1, 0), "slope_s": times.slope_s}
        effect = spread(step_s, batch_size)
        if effect < self.fine:
            return Decision(batch_size, state, f"held: straggler effect {effect:.1%}")
        if effect >= self.rapid and watch == 0:
            best = allocate(times, cluster)
            state = {**state, "held": best, "watch": self.observation_steps}
            return Decision(best, state, f"rapid: straggler effect {effect:.1%}")

        pair = find_pair(batch_size, step_s, cluster=cluster)
        amount = pair.amount(1)
        if amount == 0 or overshoots(step_s, times.slope_s, pair, amount):
            reason = f"held: straggler effect {effect:.1%}, but no granule would lower it"
            return Decision(batch_size, state, reason)
        fine = moved(batch_size, pair, amount)
        reason = f"fine: straggler effect {effect:.1%}, rank {pair.straggler} to {pair.leader}"
        return Decision(fine, {**state, "held": fine}, reason)

    def _fit(self, batch_size: IntArray, step_s: FloatArray, known: FloatArray) -> AffineTime:
        """Return the lines through one step and the profiled fixed costs."""
        ran = batch_size > 0
        intercept = np.zeros(len(step_s))
        if self.intercept_s is not None:
            intercept = np.array(self.intercept_s, np.float64)
        elif self.profile is not None:
            intercept = np.maximum(self.profile.coefficients[:, 3], 0.0)
        intercept = np.where(ran, np.minimum(intercept, 0.9 * step_s), intercept)
        slope = np.divide(step_s - intercept, batch_size, out=known.copy(), where=ran)
        return AffineTime(intercept, np.where(slope > 0, slope, slope[ran].mean()))
