"""From the reports of a step to the plan of the next where samples are assigned by their cost."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import final

import numpy as np

from .._types import Cluster, FloatArray, IntArray, StepTimings
from ..events import EstimatesRestored, Event
from ..policies._base import LEAST_SAVING_S, READING_S, equal_split, errors_by_chance
from ..prediction._affine_filter import AffineFilter
from ..solve import WorkerCosts
from ..solve._allocate import allocate
from ..timemodels import CostEstimator
from ..timemodels._cost_model import CostModel
from ..timemodels._curves import AffineTime
from ..timemodels._memory_model import MemoryModel
from ._base import AbstractPlanner, held, rejected
from ._job import Job
from ._learnt import BY_COST, Learnt
from ._memory_caps import SizeCaps
from ._plan import Plan, PlanCosts, Readings, Report, Work, lasted_s
from ._sample_costs import SampleCosts

WORTH = 0.01  # of a step, which a new plan has to save
_LEAST_STEPS = 32  # before features are judged
_FEW_STEPS = 8  # until which ranks differ by a factor alone, and not in what of a step is fixed
_BETTER = 0.95  # of the error by counts, below which those are left for features


@final
@dataclass(frozen=True, slots=True, eq=False)
class CostChoice:
    """What a plan goes by.

    Attributes:
        model: seconds of each rank, by features; where samples are counted, by the first of them.
        by_cost: whether samples are assigned by it, and not counted.
        knows: whether it distinguishes samples; until lengths are known, all cost the mean one's.
        is_apart: whether each rank has a speed of its own, and not all the same.
    """

    model: CostModel
    by_cost: bool = True
    knows: bool = True
    is_apart: bool = False

    def next(
        self,
        estimator: CostEstimator,
        recent: Sequence[FloatArray],
        *,
        by_speed: bool,
        always_by_cost: bool,
        knows: bool = True,
        differ: bool = True,
    ) -> CostChoice:
        """Return what the next plan would go by, after this one.

        Ranks are taken to be alike until the saving by their speeds exceeds a millisecond, and what
        noise alone would pretend (``errors_by_chance``); and again once it falls below half of it.
        At first they differ by a factor alone, as a few noisy steps do not show what of a step is
        fixed: a rank that seemed to have only fixed costs would get next to nothing, and stay so.
        Samples are counted once features predict no better than counts, and assigned by cost again
        once they do. So they are from the start where all cost the same.

        Args:
            estimator: that has a model.
            recent: work of steps, each ``(world_size, num_features)``.
            by_speed: whether ranks may differ.
            always_by_cost: whether samples are never counted.
            knows: whether lengths are known. Reports give those of what was computed, at any time.
            differ: whether samples differ in what is known of them.
        """
        model, counted = estimator.model, estimator.by_count
        assert model is not None
        assert counted is not None
        is_judged = estimator.num_steps >= _LEAST_STEPS and not np.isnan(estimator.error)
        bar = estimator.error_by_count * (1 if self.by_cost else _BETTER)
        informs = differ or not knows
        by_cost = always_by_cost or (informs and (not is_judged or estimator.error < bar))
        if not by_cost:
            model = _by_count(counted.intercept_s, counted.slope_s[:, 0], model)
        elif not knows:
            mean = estimator.features.sum(axis=(0, 1)) / max(estimator.counts.sum(), 1)
            model = _by_count(model.intercept_s, model.slope_s @ mean, model)
        one = np.ones_like(model.slope_s)
        alike = CostModel(one[:, 0] * model.intercept_s.mean(), one * model.slope_s.mean(axis=0))
        if not (by_speed and self._pays(model, recent, estimator.uncertainty())):
            return CostChoice(alike, by_cost, knows)
        if estimator.num_steps < _FEW_STEPS:
            # At equal shares: a rank's own work may be none at all, where others took it over.
            shares = [work.mean(axis=0) for work in recent]
            each_s = np.mean([model.seconds(one) / alike.seconds(one) for one in shares], axis=0)
            model = CostModel(alike.intercept_s * each_s, alike.slope_s * each_s[:, None])
        return CostChoice(model, by_cost, knows, is_apart=True)

    def _pays(self, model: CostModel, recent: Sequence[FloatArray], error: FloatArray) -> bool:
        """Return whether each rank's own speed saves more over equal shares than noise does."""
        whole = [work.sum(axis=0) for work in recent]
        equal_s = np.mean([model.seconds(work / len(error)) for work in whole], axis=0)
        slowest = int(np.argmax(equal_s))
        saving = 1 - np.mean([model.level_s(work) for work in whole]) / equal_s[slowest]
        needed = max(WORTH, LEAST_SAVING_S / equal_s[slowest])
        needed += errors_by_chance(len(error)) * error[slowest]
        return bool(saving >= (0.5 * needed if self.is_apart else needed))

    def gain(self, before: CostModel, recent: Sequence[FloatArray]) -> float:
        """Return by how much steps would be shorter than under a plan by ``before``, as a share.

        By this model, recent steps end so much later than if they were cut level; some of that,
        the plan foresaw: samples cannot be cut.
        """
        now, foreseen = [
            np.mean([one.seconds(work).max() / one.level_s(work.sum(axis=0)) for work in recent])
            for one in (self.model, before)
        ]
        return float(1 - foreseen / now)


def _by_count(intercept_s: FloatArray, each_s: FloatArray, like: CostModel) -> CostModel:
    """Return a model of the same features by which each sample takes a rank as long."""
    slope = np.zeros_like(like.slope_s)
    slope[:, 0] = each_s
    return CostModel(intercept_s, slope)


_AT_ONCE = 0.1  # of a step: a plan that saves it does not wait for what is fetched
_RECENT = 8  # steps by which that is judged
_KEPT = 32  # steps, for a checkpoint


@final
class CostPlanner(AbstractPlanner):
    """Plans by what samples cost: it learns that from the reports, and says it in integers.

    Which sample goes to whom follows from the integers on every rank, by ``solve.partition``.
    Where lengths predict no more than counts do, plans count samples. So they do until lengths are
    known, with the speeds found from reports: those have the lengths of what ranks computed.

    - The first step of a run warms up and teaches nothing, nor does one with a report that cannot
      be, which an event names.
    - Steps of a few milliseconds are learnt from together, as where samples are counted.
    - Ranks are taken to be alike until their speeds save more than noise pretends
      (``CostChoice``). A plan follows where it saves 1 % of a step, and what noise makes of that.
      It waits until what loaders have fetched ahead is used up, unless it saves 10 %: samples that
      change hands are fetched twice.
    - Where a rank asks for no other sizes, as each costs a compilation, samples are counted from
      then on, in sizes that stay; not where forwards have caps, which counts would not keep.
    - Forwards keep within what fits (``SizeCaps``), by the peaks of memory that ranks report and by
      what they found to be too large. Samples are counted where as many of the longest would fit;
      otherwise equal costs assign them within what fits.

    Fitting takes milliseconds, and no rank waits for it. It reads no clock and sends no messages.

    Args:
        job: what is planned for.
        costs: of the samples.
        kinds: a number for the kind of device of each rank.
        by_speed: whether ranks differ in speed; if not, only lengths are balanced.
        ahead: steps that loaders fetch ahead.
        memory: how peaks become caps; the default suits most models.
    """

    def __init__(
        self,
        job: Job,
        costs: SampleCosts,
        *,
        kinds: Sequence[int],
        by_speed: bool = True,
        ahead: int = 2,
        memory: MemoryModel | None = None,
    ) -> None:
        self._job = job
        self._costs = costs
        self._by_speed = by_speed
        self._ahead = ahead
        self._cluster = Cluster(job.world_size, job.global_batch_size, min_batch_size=0)
        self._estimator = CostEstimator.fresh(num_features=costs.num_features, kinds=kinds)
        self._readings = Readings[Sequence[Report]](READING_S)
        self._num_measured = 0
        self._held = False  # because a worker asked for it
        self._caps = SizeCaps(job.world_size, costs, memory or MemoryModel())
        self._choice = self._first_choice()
        self._recent: deque[FloatArray] = deque(maxlen=_RECENT)
        equal = equal_split(self._cluster)
        model = None if self._counts(equal) else self._choice.model
        reason = f"{_how(self._choice)}, from equal speeds on"
        self.plan = self._make_plan(0, 0, model, equal, reason)

    def observe(
        self, reports: Sequence[Report], *, next_step: int, ask: bool = True
    ) -> tuple[Event, ...]:
        """Return what follows from one step: mostly later, by ``catch_up``."""
        events = (*self.catch_up(next_step=next_step), *self._cap(reports, next_step))
        if bad := rejected(reports):
            return (*events, *bad)
        self._num_measured += 1
        if self._num_measured > 1:
            took_s = max(report.compute_s for report in reports if report.batch_size)
            if steps := self._readings.add(None, took_s, reports, wall_s=lasted_s(reports)):
                self._put_off = partial(self._learn, steps)
        return (*events, *self._hold(reports, next_step), *self._turned(next_step))

    @property
    def hold(self) -> int:
        return self._readings.num_left

    def equal_plan(self, first_step: int, reason: str) -> Plan:
        """Return a plan of equal sizes by count, for good; where forwards have caps, by length."""
        equal = equal_split(self._cluster)
        model = None if self._may_count(equal) else self._first_choice().model
        return self._make_plan(self.plan.epoch + 1, first_step, model, equal, reason)

    def learnt(self) -> Learnt:
        world_size, known = self._job.world_size, self._estimator
        return {
            "policy": BY_COST,
            "policy_state": {
                "cost": repr(self._costs.cost),
                "features": known.features[-_KEPT:],
                "counts": known.counts[-_KEPT:],
                "seconds": np.nan_to_num(known.seconds[-_KEPT:]),
            },
            "global_batch_size": self._job.global_batch_size,
            "batch_size": np.array(self.plan.batch_size, np.int64),
            "times": AffineFilter().init(world_size),
            "memory": self._caps.peaks,
        }

    def restore(self, learnt: Learnt, former: IntArray) -> EstimatesRestored:
        """Learn from the steps of an earlier run, where it has measured every rank of this one.

        Peaks of memory stay with their workers if there are as many as before, as where samples are
        counted, and if lengths are the same: they are by what those count.

        Args:
            learnt: from ``learnt`` of a planner.
            former: the rank each worker had then, -1 for one that is new, ``(world_size,)``.
        """
        state, how = learnt["policy_state"], "anew"
        is_by_cost, num_before = learnt["policy"] == BY_COST, len(learnt["batch_size"])
        if is_by_cost and num_before == len(former) and state.get("cost") == repr(self._costs.cost):
            self._caps.restore(learnt["memory"], former)
            self.plan = self._planned(self._choice, 0, 0)
        if is_by_cost and (former >= 0).all():
            shown = [state[name] for name in ("features", "counts", "seconds")]
            if shown[0].ndim == 3 and shown[0].shape[2] == self._costs.num_features:
                for step in zip(*[part[:, former] for part in shown], strict=True):
                    self._take(*(one[None] for one in step))
                how = "rehearsed"
        if self._estimator.model is not None:
            self.plan = self._planned(self._next_choice(), 0, 0)
        return EstimatesRestored(tuple((former >= 0).tolist()), how, self.plan.batch_size)

    def _take(self, features: FloatArray, counts: FloatArray, seconds: FloatArray) -> None:
        """Take in steps together, each an array ``(num_steps, ...)``; 0 seconds are not known."""
        self._recent.extend(features)
        took = np.where(seconds > 0, seconds, np.nan)
        self._estimator = self._estimator.observe(features, counts, took)

    def _learn(
        self, steps: Sequence[Sequence[Report]], *, next_step: int, ask: bool
    ) -> list[Event]:
        """Take in steps; return the plan that follows from them, as an event, if one does."""
        counts = np.array([[one.batch_size for one in reports] for reports in steps], np.float64)
        seconds = np.array([[one.compute_s for one in reports] for reports in steps])
        before = self._estimator.model
        features = np.array([_features(reports, "own") for reports in steps])
        self._take(features, counts, np.where(counts > 0, seconds, 0.0))
        if self._held or self._estimator.model is None or self._estimator.model is before:
            return []
        choice = self._next_choice()
        gain = choice.gain(self._choice.model, self._recent)
        waits = next_step - 1 < self.plan.first_step  # a plan is on its way
        needed = WORTH + float(self._estimator.uncertainty().max())
        if choice.by_cost == self._choice.by_cost and gain < (_AT_ONCE if waits else needed):
            return []
        late = 0 if gain >= _AT_ONCE or before is None else self._ahead
        return self._replan(choice, next_step + late)

    def _turned(self, next_step: int) -> list[Event]:
        """Plan by lengths as soon as they are known; little may have been measured by then."""
        if self._held or self._costs.is_known == self._choice.knows:
            return []
        is_fitted = self._estimator.model is not None
        return self._replan(self._next_choice() if is_fitted else self._first_choice(), next_step)

    def _replan(self, choice: CostChoice, first_step: int) -> list[Event]:
        return self._follow(self._planned(choice, self.plan.epoch + 1, first_step))

    def _first_choice(self) -> CostChoice:
        slope = np.tile(self._costs.start() / 1.0, (self._job.world_size, 1))
        model = CostModel(np.zeros(self._job.world_size), slope)
        knows = self._costs.is_known
        by_cost = self._costs.cost.is_capped or self._costs.differ or not knows
        return CostChoice(model, by_cost, knows)

    def _next_choice(self) -> CostChoice:
        return self._choice.next(
            self._estimator,
            self._recent,
            by_speed=self._by_speed,
            always_by_cost=self._costs.cost.is_capped,
            knows=self._costs.is_known,
            differ=self._costs.differ,
        )

    def _hold(self, reports: Sequence[Report], next_step: int) -> list[Event]:
        """Count samples, in sizes that stay, from the first report on that asks for it."""
        if self._held or not held(reports):
            return []
        self._held = True
        sizes = np.array(self.plan.batch_size)
        if not self._may_count(sizes):
            return held(reports, also=", but forwards have caps, and sizes go on by cost")
        reason = "by count, as sizes have to stay"
        plan = self._make_plan(self.plan.epoch + 1, next_step, None, sizes, reason)
        return [*held(reports, also=": samples are counted from here on"), *self._follow(plan)]

    def _cap(self, reports: Sequence[Report], next_step: int) -> list[Event]:
        """Take in what ranks report of their memory; plan within caps that have moved.

        At once, also where caps only rise: that comes up to five times in a run, at its start, and
        fewer than one sample in 70 of its first 150 steps is fetched twice for it.
        """
        news = self._caps.observe(reports)
        stays = self._held and self._may_count(np.array(self.plan.batch_size))
        if not news or stays or self._caps.caps is None:
            return news
        return [*news, *self._replan(self._choice, next_step)]

    def _counts(self, sizes: IntArray) -> bool:
        """Return whether the choice is to count samples, and caps allow these sizes."""
        return not self._choice.by_cost and self._may_count(sizes)

    def _may_count(self, sizes: IntArray) -> bool:
        """Return whether so many samples of each rank keep to all caps, whichever they are."""
        return not self._costs.cost.is_capped and self._caps.hold(sizes)

    def _planned(self, choice: CostChoice, epoch: int, first_step: int) -> Plan:
        self._choice, model = choice, choice.model
        each_s = np.maximum(model.slope_s @ self._costs.mean, 1e-12)
        sizes = allocate(AffineTime(model.intercept_s, each_s), self._cluster)
        reason = _how(choice)
        model_in_force = None if self._counts(sizes) else model
        if choice.by_cost:
            speed = each_s.max() / each_s
            some = ", ".join(f"{one:.2f}" for one in speed[:8]) + ", ..." * (len(speed) > 8)
            reason = f"{_how(choice)}, speeds {some}"
        return self._make_plan(epoch, first_step, model_in_force, sizes, reason)

    def _make_plan(
        self, epoch: int, first_step: int, model: CostModel | None, sizes: IntArray, reason: str
    ) -> Plan:
        costs = tail = caps = None
        if model is not None:
            caps = self._caps.caps
            most = np.tile(self._costs.most, (self._job.global_batch_size, 1))
            knows = self._costs.is_known
            costs = PlanCosts.of(WorkerCosts.rounded(model, most), knows=knows)
        if self._job.tail_size:
            cluster = replace(self._cluster, global_batch_size=self._job.tail_size)
            tail = tuple(equal_split(cluster).tolist())
        return Plan(
            epoch,
            first_step,
            tuple(sizes.tolist()),
            tail=tail,
            max_forward=None if caps is None else tuple(caps.tolist()),
            reason=reason,
            costs=costs,
        )

    def _otherwise(
        self, reports: Sequence[Report], plan: Plan, timings: StepTimings
    ) -> Mapping[str, float]:
        """Return what the step would have cost with other assignments of its samples.

        By the model, times what the step took over what the model says of it.
        """
        model = self._estimator.model
        if model is None:
            return {}
        own, equal, counted = [_features(reports, name) for name in Work._fields]
        ran = np.array([report.batch_size > 0 for report in reports])
        took = max(report.compute_s for report in reports if report.batch_size)
        luck = took / max(float(model.seconds(own)[ran].max()), 1e-12)
        whole = own.sum(axis=0)
        return {
            "equal_split_s": luck * float(model.seconds(equal).max()),
            "best_split_s": min(luck * model.level_s(whole), took),
            "speed_split_s": luck * float(model.seconds(counted).max()),
            "cost_split_s": luck * float(model.seconds(whole / self._job.world_size).max()),
        }


def _features(reports: Sequence[Report], name: str) -> FloatArray:
    """Return features of what each rank computed, or would have, ``(world_size, num_features)``."""
    works = [report.work for report in reports]
    assert all(isinstance(work, Work) for work in works)
    return np.array([getattr(work, name) for work in works], np.float64)


def _how(choice: CostChoice) -> str:
    if not choice.by_cost:
        return "by count, as lengths tell no more than counts do"
    return "by cost" if choice.knows else "by count until lengths are known"
