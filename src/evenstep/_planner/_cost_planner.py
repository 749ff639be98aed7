"""From the reports of a step to the plan of the next where samples are assigned by their cost."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import final

import numpy as np

from .._types import Cluster, FloatArray, IntArray
from ..events import (
    EstimatesRestored,
    Event,
    MeasurementRejected,
    Rebalanced,
    StepMeasured,
)
from ..policies import Equal
from ..prediction._affine_filter import AffineFilter
from ..solve import WorkerCosts
from ..solve._allocate import allocate
from ..timemodels import CostEstimator
from ..timemodels._affine import AffineTime
from ..timemodels._cost_model import CostModel
from ..timemodels._memory_model import MemoryModel
from ._job import Job
from ._learnt import Learnt
from ._measured import measured
from ._plan import Outcome, Plan, PlanCosts
from ._report import Report, Work, timings_of
from ._sample_costs import SampleCosts
from ._whatif import SplitCosts

_POLICY = "by cost"
_WORTH = 0.01  # of a step, which a new plan has to save
_AT_ONCE = 0.1  # likewise, from which on it does not wait for what is fetched
_RECENT = 8  # steps by which that is judged
_KEPT = 32  # steps, for a checkpoint
_LEAST_STEPS = 32  # before features are judged


@final
class CostPlanner:
    """Plans by what samples cost: it learns that from the reports, and says it in integers.

    Which sample goes to whom follows from the integers on every rank, by ``solve.partition``.
    Where lengths tell no more than counts do, plans count samples.

    - The first step of a run warms up and teaches nothing, nor does one with a report that cannot
      be, which an event names.
    - A plan follows where it saves 1 % of a step. It waits until what loaders have fetched ahead
      is used up, unless it saves 10 %: samples that change hands are fetched twice.

    Fitting takes milliseconds, and no rank waits for it. It reads no clock and sends no messages.

    Args:
        job: what is planned for.
        costs: of the samples.
        kinds: a number for the kind of device of each rank.
        by_speed: whether ranks differ in speed; if not, only lengths are balanced.
        ahead: steps that loaders fetch ahead.
    """

    claims: None = None
    keeps_for: float = 0

    def __init__(
        self,
        job: Job,
        costs: SampleCosts,
        *,
        kinds: Sequence[int],
        by_speed: bool = True,
        ahead: int = 2,
    ) -> None:
        self._job = job
        self._costs = costs
        self._by_speed = by_speed
        self._ahead = ahead
        self._cluster = Cluster(job.world_size, job.global_batch_size, min_batch_size=0)
        self._kinds = tuple(kinds)
        self._estimator = self._fresh()
        self._shown: deque[tuple[FloatArray, FloatArray, FloatArray]] = deque(maxlen=_KEPT)
        self._num_measured = 0
        self._put_off: Sequence[Report] | None = None
        slope = np.tile(costs.start() / 1.0, (job.world_size, 1))
        self._start = self._published = CostModel(np.zeros(job.world_size), slope)
        self._recent: deque[FloatArray] = deque(maxlen=_RECENT)
        equal = Equal().init(self._cluster).batch_size
        self.plan = self._make_plan(0, 0, self._start, equal, "by cost, from equal speeds on")

    def observe(self, reports: Sequence[Report], *, next_step: int, ask: bool = True) -> Outcome:
        """Return what follows from one step: mostly later, by ``catch_up``."""
        events = list(self.catch_up(next_step=next_step, ask=ask).events)
        step = reports[0].step
        bad = [(rank, report.problem()) for rank, report in enumerate(reports)]
        rejected = [MeasurementRejected(step, rank, problem) for rank, problem in bad if problem]
        if rejected:
            return Outcome(self.plan, (*events, *rejected))
        self._num_measured += 1
        if self._num_measured > 1:
            self._put_off = reports
        return Outcome(self.plan, tuple(events))

    @property
    def is_behind(self) -> bool:
        """Whether a step was put off that it has not learnt from."""
        return self._put_off is not None

    def catch_up(self, *, next_step: int, ask: bool = True) -> Outcome:
        """Learn from the step that was put off, if one was. No rank waits for it.

        Args:
            next_step: the first step that can still use a new plan, now.
            ask: has no meaning here.
        """
        reports, self._put_off = self._put_off, None
        return Outcome(self.plan, () if reports is None else tuple(self._learn(reports, next_step)))

    def account(self, reports: Sequence[Report], plan: Plan) -> StepMeasured | None:
        """Return what a step cost, and would have cost otherwise; None if a report cannot be."""
        if any(report.problem() for report in reports):
            return None
        timings = timings_of(reports)
        known = self._estimator.model is not None
        return measured(reports, plan, timings, costs=self._otherwise(reports) if known else None)

    def equal_plan(self, first_step: int, reason: str) -> Plan:
        """Return a plan of equal sizes by count, for good; where forwards have caps, by length."""
        equal = Equal().init(self._cluster).batch_size
        model = self._start if self._costs.cost.is_capped else None
        return self._make_plan(self.plan.epoch + 1, first_step, model, equal, reason)

    def burden(self, step: int) -> None:
        """Return None: whether a rank helps is looked for where samples are counted."""

    def learnt(self) -> Learnt:
        """Return what the steps so far have taught: arrays and plain values, not to be changed."""
        world_size, num = self._job.world_size, self._costs.num_features
        shape = (len(self._shown), world_size)
        features = np.array([one for one, _, _ in self._shown]).reshape(*shape, num)
        counts = np.array([one for _, one, _ in self._shown]).reshape(shape)
        seconds = np.array([one for _, _, one in self._shown]).reshape(shape)
        return {
            "policy": _POLICY,
            "policy_state": {"features": features, "counts": counts, "seconds": seconds},
            "global_batch_size": self._job.global_batch_size,
            "batch_size": np.array(self.plan.batch_size, np.int64),
            "times": AffineFilter().init(world_size),
            "memory": MemoryModel().init(world_size),
        }

    def restore(self, learnt: Learnt, former: IntArray) -> EstimatesRestored:
        """Learn from the steps of an earlier run, where it has measured every rank of this one.

        Args:
            learnt: from ``learnt`` of a planner.
            former: the rank each worker had then, -1 for one that is new, ``(world_size,)``.
        """
        state, how = learnt["policy_state"], "anew"
        if learnt["policy"] == _POLICY and (former >= 0).all():
            shown = [state[name] for name in ("features", "counts", "seconds")]
            if shown[0].ndim == 3 and shown[0].shape[2] == self._costs.num_features:
                steps = zip(*[part[:, former] for part in shown], strict=True)
                for features, counts, seconds in steps:
                    self._take(features, counts, seconds)
                how = "rehearsed"
        if self._estimator.model is not None:
            self.plan = self._planned(self._wanted(), 0, 0)
        return EstimatesRestored(tuple((former >= 0).tolist()), how, self.plan.batch_size)

    def _fresh(self) -> CostEstimator:
        return CostEstimator.fresh(num_features=self._costs.num_features, kinds=self._kinds)

    def _take(self, features: FloatArray, counts: FloatArray, seconds: FloatArray) -> None:
        self._shown.append((features, counts, seconds))
        self._recent.append(features)
        self._estimator = self._estimator.observe(
            features, counts, np.where(seconds > 0, seconds, np.nan)
        )

    def _learn(self, reports: Sequence[Report], next_step: int) -> list[Event]:
        """Take in a step; return the plan that follows from it, as an event, if one does."""
        counts = np.array([report.batch_size for report in reports], np.float64)
        seconds = np.array([report.compute_s for report in reports])
        before = self._estimator.model
        self._take(_features(reports, "own"), counts, np.where(counts > 0, seconds, 0.0))
        if self._estimator.model is None or self._estimator.model is before:
            return []
        model = self._wanted()
        gain = self._gain(model)
        turns = (self.plan.costs is None) == self._goes_by_cost
        waits = next_step - 1 < self.plan.first_step  # a plan is on its way
        if not turns and gain < (_AT_ONCE if waits else _WORTH):
            return []
        late = 0 if gain >= _AT_ONCE or before is None else self._ahead
        plan = self.plan = self._planned(model, self.plan.epoch + 1, next_step + late)
        return [Rebalanced(plan.first_step, plan.epoch, plan.batch_size, plan.reason)]

    @property
    def _goes_by_cost(self) -> bool:
        """Whether plans go by cost: until features are known to tell no more than counts do."""
        estimator = self._estimator
        is_judged = estimator.num_steps >= _LEAST_STEPS and not np.isnan(estimator.error)
        return estimator.is_useful or not is_judged or self._costs.cost.is_capped

    def _wanted(self) -> CostModel:
        """Return what is to be planned by: the features, or their first one, which counts."""
        model, counted = self._estimator.model, self._estimator.by_count
        assert model is not None
        assert counted is not None
        if not self._goes_by_cost:
            slope = np.zeros_like(model.slope_s)
            slope[:, :1] = counted.slope_s
            model = CostModel(counted.intercept_s, slope)
        if self._by_speed:
            return model
        alike = np.ones_like(model.slope_s)
        return CostModel(alike[:, 0] * model.intercept_s.mean(), alike * model.slope_s.mean(axis=0))

    def _gain(self, model: CostModel) -> float:
        """Return by how much steps would be shorter under ``model``, as a share of them.

        By it, recent steps end so much later than if they were cut level; some of that, the plan
        foresaw: samples cannot be cut.
        """
        now, foreseen = [
            np.mean(
                [one.seconds(work).max() / _level(one, work.sum(axis=0)) for work in self._recent]
            )
            for one in (model, self._published)
        ]
        return float(1 - foreseen / now)

    def _planned(self, model: CostModel, epoch: int, first_step: int) -> Plan:
        self._published = model
        each_s = np.maximum(model.slope_s @ self._costs.mean, 1e-12)
        sizes = Equal().init(self._cluster).batch_size
        if self._by_speed:
            sizes = allocate(AffineTime(model.intercept_s, each_s), self._cluster)
        reason = "by count, as lengths tell no more than counts do"
        if self._goes_by_cost:
            speed = each_s.max() / each_s
            some = ", ".join(f"{one:.2f}" for one in speed[:8]) + ", ..." * (len(speed) > 8)
            reason = f"by cost, speeds {some}"
        return self._make_plan(
            epoch, first_step, model if self._goes_by_cost else None, sizes, reason
        )

    def _make_plan(
        self, epoch: int, first_step: int, model: CostModel | None, sizes: IntArray, reason: str
    ) -> Plan:
        costs = tail = None
        if model is not None:
            most = np.tile(self._costs.most, (self._job.global_batch_size, 1))
            costs = PlanCosts.of(WorkerCosts.rounded(model, most))
        if self._job.tail_size:
            cluster = replace(self._cluster, global_batch_size=self._job.tail_size)
            tail = tuple(Equal().init(cluster).batch_size.tolist())
        return Plan(epoch, first_step, tuple(sizes.tolist()), tail=tail, reason=reason, costs=costs)

    def _otherwise(self, reports: Sequence[Report]) -> SplitCosts:
        """Return what the step would have cost with other assignments of its samples.

        By the model, times what the step took over what the model says of it.
        """
        model = self._estimator.model
        assert model is not None
        own, equal, counted = [_features(reports, name) for name in Work._fields]
        ran = np.array([report.batch_size > 0 for report in reports])
        took = max(report.compute_s for report in reports if report.batch_size)
        luck = took / max(float(model.seconds(own)[ran].max()), 1e-12)
        whole = own.sum(axis=0)
        return SplitCosts(
            equal_s=luck * float(model.seconds(equal).max()),
            best_s=min(luck * _level(model, whole), took),
            speed_s=luck * float(model.seconds(counted).max()),
            cost_s=luck * float(model.seconds(whole / self._job.world_size).max()),
        )


def _features(reports: Sequence[Report], name: str) -> FloatArray:
    """Return features of what each rank computed, or would have, ``(world_size, num_features)``."""
    works = [report.work for report in reports]
    assert all(isinstance(work, Work) for work in works)
    return np.array([getattr(work, name) for work in works], np.float64)


def _level(model: CostModel, work: FloatArray) -> float:
    """Return when all ranks end together with the work of a step, if it could be cut anywhere."""
    cost, start = np.maximum(model.slope_s @ work, 1e-300), model.intercept_s
    order = np.argsort(start)
    for last in range(len(order), 0, -1):
        some = order[:last]
        level = (1 + (start[some] / cost[some]).sum()) / (1 / cost[some]).sum()
        if level >= start[order[last - 1]]:
            break
    return float(level)
