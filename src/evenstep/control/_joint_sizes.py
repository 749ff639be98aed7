"""Batch sizes that make up for what nothing hides of an exchange: begun, followed and dropped."""

from __future__ import annotations

from collections import deque
from typing import final

import numpy as np

from .._minmax import allocate
from .._types import FloatArray, IntArray
from ..events import Event, JointlyPlanned
from ..exceptions import invalid
from ..sharding import Aggregation, Links
from ..timemodels import AffineTime
from ._computing import Computing
from ._joint import JointPlan, plan_jointly
from ._timeline import timeline_s

EVERY = 8  # steps by shares between two looks, as a look costs some milliseconds
SAME = 0.05  # a relative change of links or times below which nothing is planned anew
BALANCED = 1.05  # sizes follow the policy's balance of computing if they are no slower by this
FIRST_WAIT, LONGEST_WAIT = 100, 1600  # steps after joint sizes were dropped


@final
class JointSizes:
    r"""Says how much of its exchange each rank's batch makes up for.

    The policy is shown $t_i + x_i$, so whichever it is, it balances computing and the part $x_i$
    of a rank's exchange that nothing hides. The $x$ come from ``plan_jointly`` for the shares in
    force, which stay: over 160 drawn clusters other shares gained 0.1 % more at most, in the mean.

    - They are 0 until ``plan_jointly`` foresees ``margin`` less for the step, on links as they are
      believed to be and workers as they were measured. That is the exception.
    - They end where it foresees no gain any more, and with the shares themselves: plain all-reduce
      begins with the slowest worker, and hides nothing.
    - They end if steps are slower than they would be without, by what was measured before, beyond
      two standard errors of both; then not again for 100, then 200, ... and at most 1600 steps.

    Right for workers that all serve, with times that are straight lines. Never begun where sizes
    do not follow computing, as those of a fixed policy.

    It reads no clock and talks to nobody: a step in, ``extra_s`` and events out.

    Args:
        aggregation: what is summed, by whom, in how many chunks.
        overlap: part of computing, at its end, during which gradients become ready, in [0, 1].
        margin: part of the step that joint sizes have to save by the model, at least 0.

    Attributes:
        extra_s: for ``Planner.compensate``, ``(num_workers,)``; another object when it changes.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self, aggregation: Aggregation, *, overlap: float = 0.0, margin: float = 0.02
    ) -> None:
        if not 0 <= overlap <= 1:
            remedy = "0 if it is not known."
            raise invalid("JointSizes(overlap=...)", "be in [0, 1]", overlap, remedy)
        if not (np.isfinite(margin) and margin >= 0):
            rule, remedy = "be finite and at least 0", "0.02 is 2 %."
            raise invalid("JointSizes(margin=...)", rule, margin, remedy)
        self._aggregation, self._overlap, self._margin = aggregation, overlap, margin
        # A rank that only serves has no batch, and its place among the workers is not known here.
        self._useful = bool((aggregation.is_worker & aggregation.is_server).all())
        self._nothing = np.zeros(aggregation.num_workers)
        self.extra_s: FloatArray = self._nothing
        self._shares: FloatArray | None = None
        self._steps = _Steps()
        self._before = _Steps()  # the last ones with sizes for computing alone
        self._num_seen = 0
        self._planned: _Planned | None = None
        self._wait, self._not_before = FIRST_WAIT, 0

    @property
    def is_joint(self) -> bool:
        """Whether sizes make up for anything."""
        return bool(self.extra_s.any())

    def observe(
        self,
        step: int,
        computing: Computing | None,
        links: Links | None,
        shares: FloatArray | None,
    ) -> tuple[Event, ...]:
        """Take in a step, and return what changes.

        Args:
            step: which one.
            computing: what is known of that; None where sizes do not follow a policy.
            links: what they are believed to carry; None if nothing is known.
            shares: those of the step, ``(world_size,)``; None for plain all-reduce.
        """
        if shares is None or computing is None or links is None or not self._useful:
            return self._end(step, "the exchange is no longer by shares that can be planned with")
        before, self._shares = self._shares, shares
        if before is None or not np.array_equal(before, shares):
            return ()  # the first step of its kind, or one that only looks at a link
        planned, self._num_seen = self._planned, self._num_seen + 1
        looks = self._num_seen % EVERY == 0
        if (
            planned is None
            or not planned.is_for(shares)
            or (looks and not planned.holds_for(computing, links))
        ):
            planned = self._plan(computing, links, shares)
        self._planned = planned
        if computing.wall_s is not None:
            self._steps.add(computing.wall_s / planned.plan.separate_s)
        return self._look(step, computing, planned) if looks and self._steps else ()

    def _look(self, step: int, computing: Computing, planned: _Planned) -> tuple[Event, ...]:
        """Compare what is with what could be."""
        plan = planned.plan
        if not self.is_joint:
            return self._begin(step, computing, plan)
        before, now = self._before, self._steps
        doubt = 2 * float(np.hypot(before.error, now.error))
        if now.median > before.median * (1 + doubt):
            self._not_before, self._wait = step + self._wait, min(2 * self._wait, LONGEST_WAIT)
            took_s, usual_s = (each.median * plan.separate_s for each in (now, before))
            return self._end(step, f"steps took {took_s:.3g} s, and {usual_s:.3g} s before")
        if planned.now_s > plan.separate_s * (1 - self._margin / 2):
            if plan.gains:
                return self._adopt(step, plan)
            return self._end(step, "by the model others gain nothing any more")
        if plan.step_s < planned.now_s * (1 - self._margin):
            return self._adopt(step, plan)
        return ()

    def _begin(self, step: int, computing: Computing, plan: JointPlan) -> tuple[Event, ...]:
        """Begin, if there is something to gain and sizes would follow."""
        if not plan.gains or step < self._not_before:
            return ()
        best_s = computing.times.seconds(allocate(computing.times, computing.cluster)).max()
        if computing.foreseen_s.max() > BALANCED * best_s:
            return ()
        self._before = self._steps
        return self._adopt(step, plan)

    def _adopt(self, step: int, plan: JointPlan) -> tuple[Event, ...]:
        """Make up for what the plan says."""
        self.extra_s, self._planned, self._steps = plan.extra_s, None, _Steps()
        saved = 1 - plan.step_s / plan.separate_s
        words = f"smaller batches make up for some of the exchange: {saved:.1%} less by the model"
        return (self._event(step, plan, words),)

    def _end(self, step: int, problem: str) -> tuple[Event, ...]:
        """Make up for nothing, if it is otherwise."""
        if not self.is_joint:
            return ()
        plan = None if self._planned is None else self._planned.plan
        self.extra_s, self._planned, self._steps = self._nothing, None, _Steps()
        return (self._event(step, plan, f"batches for computing alone: {problem}"),)

    def _event(self, step: int, plan: JointPlan | None, reason: str) -> JointlyPlanned:
        separate_s = None if plan is None else plan.separate_s
        step_s = plan.step_s if plan is not None and self.is_joint else separate_s
        return JointlyPlanned(step, tuple(self.extra_s.tolist()), step_s, separate_s, reason)

    def _plan(self, computing: Computing, links: Links, shares: FloatArray) -> _Planned:
        """Return the plan, and what a step takes with what is made up for now."""
        times, cluster = computing.times, computing.cluster
        plan = plan_jointly(
            times,
            cluster,
            self._aggregation,
            links,
            shares=shares,
            overlap=self._overlap,
            margin=self._margin,
        )
        now_s = plan.separate_s
        if self.is_joint:
            sizes = allocate(AffineTime(times.intercept_s + self.extra_s, times.slope_s), cluster)
            now_s = timeline_s(
                times.seconds(sizes), self._aggregation, links, shares=shares, overlap=self._overlap
            )
        return _Planned(plan, now_s, computing, links, shares)


@final
class _Planned:
    """A plan, and what it was made for."""

    def __init__(
        self,
        plan: JointPlan,
        now_s: float,
        computing: Computing,
        links: Links,
        shares: FloatArray,
    ) -> None:
        self.plan, self.now_s = plan, now_s
        self._sizes: IntArray = computing.timings.batch_size
        self._computing, self._links, self._shares = computing, links, shares

    def is_for(self, shares: FloatArray) -> bool:
        """Tell whether it was made for these shares."""
        return np.array_equal(shares, self._shares)

    def holds_for(self, computing: Computing, links: Links) -> bool:
        """Tell whether hardly anything else has changed."""
        if computing.cluster is not self._computing.cluster:
            return False
        old, new = (each.times.seconds(self._sizes) for each in (self._computing, computing))
        pairs = (
            (old, new),
            (self._links.up_bytes_per_s, links.up_bytes_per_s),
            (self._links.down_bytes_per_s, links.down_bytes_per_s),
        )
        return all(np.allclose(one, other, rtol=SAME, atol=0.0) for one, other in pairs)


@final
class _Steps:
    """The last steps of one kind, each over what separate sizes take by the model."""

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=4 * EVERY)

    def __len__(self) -> int:
        return len(self._ratios)

    def add(self, ratio: float) -> None:
        """Take in a step."""
        self._ratios.append(ratio)

    @property
    def median(self) -> float:
        """Their median."""
        return float(np.median(self._ratios))

    @property
    def error(self) -> float:
        """The relative standard error of that, by the median of what they are off."""
        middle = self.median
        off = np.median(np.abs(np.array(self._ratios) - middle)) / middle
        return float(1.4826 * 1.2533 * off / np.sqrt(len(self._ratios)))
