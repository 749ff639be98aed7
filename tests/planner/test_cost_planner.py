"""Plans by cost: lengths by name, learnt from reports, and only where they pay."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from evenstep._planner import (
    Cost,
    CostChoice,
    CostPlanner,
    EqualSizes,
    Job,
    Report,
    Work,
    assign,
    batch_lengths,
)
from evenstep.events import MeasurementRejected, MemoryCapped, Rebalanced, SizesHeld
from evenstep.solve import partition
from evenstep.timemodels import CostEstimator

from .._tiers import slow_but
from .playing import Playing

SPEED = np.array([1.0, 1.0, 2.0, 4.0])
WORLD_SIZE, BATCH_SIZE = 4, 64
LENGTH = np.clip(np.random.default_rng(0).lognormal(5, 1, 4096), 8, 1000).astype(int)


class Run(Playing):
    """Steps whose true times are known, as the ranks of a run would report them.

    Args:
        length: of every sample.
        true: seconds of a sample, of a token, and of a token squared, at speed 1.
        noise: of a time, relative.
        pauses: share of times that are several times as long.
        fixed_s: seconds of a step before its first sample.
        seen: whether lengths become known only later, to ``costs``.
        settings: of the planner.
    """

    def __init__(
        self,
        length=LENGTH,
        *,
        true=(0, 1e-4, 4e-7),
        noise=0.02,
        pauses=0.0,
        fixed_s=0.0,
        max_size=None,
        seen=False,
        **settings,
    ):
        cost = Cost(length, padded=False, max_size=max_size)
        self.true_costs = cost.table(range(len(length)))
        seen_cost = Cost(from_batch="length", padded=False)
        self.costs = seen_cost.table(range(len(length))) if seen else self.true_costs
        job = Job(WORLD_SIZE, BATCH_SIZE)
        super().__init__(CostPlanner(job, self.costs, kinds=[0] * WORLD_SIZE, **settings))
        self.true, self.noise, self.speed = np.array(true), noise, SPEED
        self.pauses, self.fixed_s, self.shares = pauses, fixed_s, []
        self.rng = np.random.default_rng(1)
        self.over = []

    def step(self, step, **changed):
        """Run a step; note its time over the bound."""
        plan = self.plan_of(step)
        indices = self.rng.integers(0, len(LENGTH), BATCH_SIZE)
        features = self.true_costs.features(indices)
        owner = np.repeat(np.arange(WORLD_SIZE), plan.batch_size)
        if plan.costs is not None:
            owner = partition(self.costs.features(indices), plan.costs.workers()).owner
        own = np.array([features[owner == rank].sum(axis=0) for rank in range(WORLD_SIZE)])
        took = own @ self.true / self.speed
        self.over.append(took.max() / (features @ self.true).sum() * self.speed.sum())
        self.shares.append(took / took.mean())
        took = (took + self.fixed_s) * self.rng.uniform(2, 20, WORLD_SIZE) ** (
            self.rng.random(WORLD_SIZE) < self.pauses
        )
        took *= 1 + self.noise * self.rng.standard_normal(WORLD_SIZE)
        work = [Work(tuple(map(int, one)), (0, 0, 0), (0, 0, 0)) for one in own]
        reports = [
            Report(step, int(n), BATCH_SIZE, float(s), 0.0, work=w, **changed)
            for n, s, w in zip(np.bincount(owner, minlength=WORLD_SIZE), took, work, strict=True)
        ]
        self.show(reports)


def test_it_learns_speeds_and_lengths_within_twenty_steps():
    """Steps within 8 % of the bound from then on, most within 4 %."""
    over = Run().run(80).over

    assert max(over[20:]) <= 1.08
    assert np.median(over[20:]) <= 1.04
    assert np.median(over[:2]) > 1.5  # or there was nothing to learn


@pytest.mark.parametrize("noise", [0.02, 0.05, 0.1])
def test_learning_costs_less_than_a_trial_would(noise):
    """Of 50 steps, seven more at most; a trial of eight mixes, four runs each, takes 32."""
    over = Run(noise=noise).run(60).over

    assert sum(over[:50]) - 50 * np.median(over[40:]) <= 7


def test_a_rank_that_slows_down_is_followed():
    """Twice as slow from step 60 on: within 10 % of the new bound 20 steps later."""
    run = Run().run(60)
    run.speed = SPEED / np.array([1, 1, 1, 2])

    over = run.run(60, first=60).over

    assert np.median(over[60:64]) > 1.2
    assert np.median(over[80:]) <= 1.1


def test_only_lengths_are_balanced_with_equal_speeds_asked_for():
    """Every rank has the same integers."""
    costs = Run(by_speed=False).run(30).planner.plan.costs

    assert len(set(costs.slope)) == len(set(costs.intercept)) == 1


def test_until_lengths_are_known_plans_count_by_speed():
    """Then they go by cost at once, as the reports of the first epoch had lengths."""
    run = Run(seen=True, noise=0.0).run(60)
    counted, by_speed = run.planner.plan, np.array(run.planner.plan.batch_size)
    run.costs.correct(np.arange(len(LENGTH)), LENGTH)
    over = run.run(40, first=60).over

    assert counted.reason.startswith("by count until lengths are known")
    assert not np.any(np.array(counted.costs.slope)[:, 1:])
    assert np.allclose(by_speed, 8 * SPEED, atol=2)
    assert np.median(over[10:60]) > 1.2
    assert run.planner.plan.reason.startswith("by cost, speeds")
    assert max(over[62:]) <= 1.08


def test_where_lengths_tell_nothing_plans_count():
    """A time that goes by the number of samples: by count, with a word; sizes by speed."""
    run = Run(true=(1e-2, 0, 0)).run(80)

    assert run.planner.plan.costs is None
    assert "lengths tell no more" in run.planner.plan.reason
    assert np.allclose(run.planner.plan.batch_size, 8 * SPEED, atol=1)
    assert np.median(run.over[60:]) <= 1.08


@pytest.mark.parametrize("cost", [Cost([7] * 64), Cost(np.full((64, 2), 3))])
def test_equal_samples_are_counted_from_the_start(cost):
    """Nothing has to be learnt for that; caps of a forward need costs all the same."""
    job, capped = Job(WORLD_SIZE, 16), replace(cost, max_samples=4)
    plans = [
        CostPlanner(job, one.table(range(64)), kinds=[0] * WORLD_SIZE).plan
        for one in (cost, capped)
    ]

    assert plans[0].costs is None
    assert plans[0].reason.startswith("by count, as lengths tell no more")
    assert plans[1].costs is not None


def test_where_lengths_matter_plans_do_not_come_back_to_counts():
    """Perfect balance makes all times alike, which is no sign that lengths do not matter."""
    run = Run(noise=0.05).run(200)

    assert all(plan.costs is not None for plan in run.plans)


def test_a_plan_follows_seldom_once_costs_are_known():
    """A new plan moves samples that were fetched: fewer than one in ten steps, of plain noise."""
    run = Run(noise=0.03).run(100)
    before = len(run.plans)

    assert len(run.run(100, first=100).plans) - before <= 10


def test_a_small_change_waits_for_what_is_fetched():
    """A large one does not."""
    late = {}
    for name, factor in {"small": 1.06, "large": 2}.items():
        run = Run(ahead=9).run(60)
        run.speed = SPEED / np.array([1, factor, 1, 1])
        number = len(run.plans)
        step = 60
        while len(run.plans) == number:
            run.step(step)
            step += 1
        late[name] = run.plans[-1].first_step - step

    assert late == {"small": 10, "large": 1}


def test_a_report_that_cannot_be_teaches_nothing():
    """It is named, and the plan stays."""
    run = Run().run(30)
    plan = run.planner.plan
    run.step(30, fault="its clock broke")

    assert run.planner.plan is plan
    assert [e.rank for e in run.events if isinstance(e, MeasurementRejected)] == [0, 1, 2, 3]


@pytest.mark.parametrize(("former", "how"), [([2, 3, 0, 1], "rehearsed"), ([0, -1, 2, 3], "anew")])
def test_a_run_goes_on_from_what_was_learnt(former, how):
    """On the same workers at other ranks; with a new one it starts anew."""
    learnt = Run().run(40).planner.learnt()
    run = Run()
    restored = run.planner.restore(learnt, np.array(former))
    run.plans = [run.planner.plan]
    run.speed = SPEED[np.maximum(former, 0)]

    assert restored.policy == how
    assert (np.median(run.run(3).over) <= 1.1) == (how == "rehearsed")


def test_what_else_the_samples_would_have_cost_is_told():
    """At equal counts, by speeds alone, by lengths alone, and at best: by the model."""
    run = Run(noise=0.0).run(30)
    features = run.costs.features(np.arange(BATCH_SIZE))
    owner = partition(features, run.planner.plan.costs.workers()).owner
    parts = np.split(features, WORLD_SIZE)
    own = [features[owner == rank].sum(axis=0) for rank in range(WORLD_SIZE)]
    counted = np.split(features, np.cumsum([8, 8, 16]))
    works = [
        Work(*(tuple(map(int, one)) for one in (mine, part.sum(axis=0), count.sum(axis=0))))
        for mine, part, count in zip(own, parts, counted, strict=True)
    ]
    reports = [
        Report(30, 16, BATCH_SIZE, float(mine @ run.true / speed), 0.0, work=work)
        for mine, speed, work in zip(own, SPEED, works, strict=True)
    ]
    told = run.planner.account(reports, run.planner.plan)
    equal = max(
        part.sum(axis=0) @ run.true / speed for part, speed in zip(parts, SPEED, strict=True)
    )

    by_speed = max(part.sum(axis=0) @ run.true / s for part, s in zip(counted, SPEED, strict=True))
    whole = (features @ run.true).sum()

    assert told.equal_split_s == pytest.approx(equal, rel=0.05)
    assert told.speed_split_s == pytest.approx(by_speed, rel=0.05)
    assert told.cost_split_s == pytest.approx(whole / WORLD_SIZE, rel=0.05)
    assert told.best_split_s == pytest.approx(whole / SPEED.sum(), rel=0.05)


@pytest.mark.parametrize("cap", [None, 1000])
def test_after_a_fault_plans_are_equal_and_still_fit(cap):
    """The short last step has its sizes too; where forwards have caps, those hold."""
    costs = Cost(LENGTH, padded=False, max_size=cap).table(range(len(LENGTH)))
    job = Job(WORLD_SIZE, BATCH_SIZE, tail_size=6)
    failed = CostPlanner(job, costs, kinds=[0] * WORLD_SIZE)
    plan = EqualSizes(failed, 5).plan

    assert plan.batch_size == (16, 16, 16, 16)
    assert sum(plan.tail) == 6
    assert (plan.costs is None) == (cap is None)


def test_a_plan_assigns_samples_of_another_data_set_that_are_far_longer():
    """The integers of a plan are as fine as one data set allows; a second loader has its own."""
    plan = CostPlanner(Job(2, 4), Cost([5, 6, 7, 8], padded=False).table(range(4)), kinds=[0, 0])
    longer = Cost([1 << 20, 1, 1 << 20, 2], padded=False).table(range(4))
    features = longer.features(np.arange(4))

    found = assign(longer, features, plan.plan.costs.workers())

    assert sorted(found.owner[[0, 2]].tolist()) == [0, 1]


@pytest.mark.parametrize(
    "of",
    [[0] * 8 + [9], [[0, 0]] * 8 + [[7, 3]], [[1 << 47, 1], [1, 1 << 47]] * 5],
    ids=["no length", "no features", "features whose costs are rounded away"],
)
def test_samples_that_cost_nothing_are_shared_out(of):
    """By their number: one rank would compute all of them but a sample for each other."""
    costs = Cost(of, padded=False).table(range(len(of)))
    plan = CostPlanner(Job(2, 8), costs, kinds=[0, 0]).plan
    found = assign(costs, costs.features(np.arange(8)), plan.costs.workers())

    assert np.bincount(found.owner).tolist() == [4, 4]


@pytest.mark.parametrize(
    ("step_s", "fixed", "noise"),
    slow_but([(1e-3, 0.9, 0.1), (5e-3, 0.3, 0.05)], product([1e-3, 5e-3], [0.3, 0.9], [0.05, 0.1])),
)
def test_equal_ranks_stay_equal_in_short_noisy_steps(step_s, fixed, noise):
    """Costs within 10 % of each other, and hardly a new plan, whatever part of a step is fixed."""
    each = (1 - fixed) * step_s / (BATCH_SIZE / WORLD_SIZE * np.mean(LENGTH))
    run = Run(true=(0, each, 0), noise=noise, pauses=0.005, fixed_s=fixed * step_s)
    run.speed = np.ones(WORLD_SIZE)

    run.run(400)

    assert np.mean(run.shares[300:], axis=0) == pytest.approx(1, abs=0.1)
    assert len(run.plans) <= 4


@pytest.mark.parametrize(("fixed", "slowest", "noise"), [(0.9, 1, 0.1), (0.3, 0.95, 0.05)])
def test_noise_brings_few_plans_on_long_steps(fixed, slowest, noise):
    """Ranks that are nearly alike: speeds that noise pretends are not followed, back and forth."""
    each = (1 - fixed) * 0.05 / (BATCH_SIZE / WORLD_SIZE * np.mean(LENGTH))
    run = Run(true=(0, 0.7 * each, 0.3 * each / 420), noise=noise, fixed_s=fixed * 0.05)
    run.speed = np.array([1, 1, 1, slowest])

    run.run(500)

    assert np.mean(run.shares[300:], axis=0) == pytest.approx(1, abs=0.1)
    assert len(run.plans) <= 13


def test_short_steps_are_learnt_from_together():
    """Unlike ranks are balanced within a second of steps of 5 ms, ten of which have one plan."""
    run = Run(true=(0, 1e-6, 0), noise=0.05)
    holds = []
    for step in range(200):
        run.step(step)
        holds.append(run.planner.hold)

    assert np.median(run.over[100:]) <= 1.08
    assert np.mean(np.array(holds) > 1) > 0.5


def test_where_sizes_have_to_stay_samples_are_counted():
    """From the next step on, in the sizes of before, for good; it is told once."""
    run = Run().run(30)
    sizes = run.planner.plan.batch_size
    run.step(30, holds=True)
    run.speed = SPEED[::-1]
    run.run(30, first=31)

    plan = run.planner.plan
    assert (plan.costs, plan.first_step, plan.batch_size) == (None, 31, sizes)
    assert sum(isinstance(event, SizesHeld) for event in run.events) == 1
    assert [e for e in run.events if isinstance(e, Rebalanced)][-1].reason == plan.reason


def test_caps_come_before_sizes_that_stay():
    """Counts would not keep them: plans go on by cost, and the event says so."""
    run = Run(max_size=2000).run(30)
    run.step(30, holds=True)

    assert run.planner.plan.costs is not None
    assert "by cost" in next(e.problem for e in run.events if isinstance(e, SizesHeld))


def test_a_limit_of_memory_is_told():
    """Once for each limit: the rank keeps to it by itself."""
    run = Run().run(10)
    for step, limit in enumerate([9, 9, 4], start=10):
        run.step(step, again=True, limit=limit)

    told = [(e.rank, e.max_batch_size) for e in run.events if isinstance(e, MemoryCapped)]
    assert told == [(rank, limit) for limit in (9, 4) for rank in range(WORLD_SIZE)]


WORK = np.tile([10.0, 1000.0], (4, 1))


def estimated(slower=1.0, noise=0.05, error=0.05, error_by_count=0.1):
    """What is known after 40 steps of a second, in which the last rank is slower."""
    estimator = CostEstimator.fresh(num_features=2, kinds=[0] * 4)
    for step in range(40):
        seconds = np.array([1, 1, 1, slower]) * (1 + noise * (-1) ** step)
        estimator = estimator.observe(WORK, np.full(4, 10), seconds)
    return replace(estimator, error=error, error_by_count=error_by_count)


ALIKE = estimated(noise=0).model


def after(now, *, by_speed=True, **known):
    """The choice that follows."""
    return now.next(estimated(**known), [WORK], by_speed=by_speed, always_by_cost=False)


@pytest.mark.parametrize(
    ("slower", "left", "kept"),
    [(1.01, False, False), (1.08, False, True), (1.4, True, True)],
)
def test_speeds_of_their_own_are_given_up_later_than_taken(slower, left, kept):
    """Where the saving is between half of what noise pretends and all of it, all stays."""
    assert after(CostChoice(ALIKE), slower=slower).is_apart is left
    assert after(CostChoice(ALIKE, is_apart=True), slower=slower).is_apart is kept


def test_more_noise_asks_for_more():
    """The same saving counts for nothing where steps vary by a third."""
    assert not after(CostChoice(ALIKE), slower=1.4, noise=0.3).is_apart


def test_alike_ranks_share_one_line():
    """The mean of all, also where speeds are not asked for."""
    model = after(CostChoice(ALIKE), slower=1.4, noise=0, by_speed=False).model

    assert model.seconds(WORK) == pytest.approx(np.full(4, 1.1))


def test_less_than_a_millisecond_is_not_worth_it():
    """However sure it is, as in ``auto``."""
    short = CostEstimator.fresh(num_features=2, kinds=[0] * 4)
    for _ in range(40):
        short = short.observe(WORK, np.full(4, 10), [1e-3, 1e-3, 1e-3, 2e-3])

    choice = CostChoice(ALIKE).next(short, [WORK], by_speed=True, always_by_cost=False)

    assert not choice.is_apart


@pytest.mark.parametrize(
    ("error", "left", "kept"), [(0.099, True, False), (0.101, False, False), (0.09, True, True)]
)
def test_counts_are_left_again_for_features_that_are_better_by_some(error, left, kept):
    """By cost until features are no better; by cost again once they are by 5 %."""
    assert after(CostChoice(ALIKE), error=error).by_cost is left
    assert after(CostChoice(ALIKE, by_cost=False), error=error).by_cost is kept


@pytest.mark.parametrize(("num_steps", "is_fixed"), [(7, False), (8, True)])
def test_at_first_ranks_differ_by_a_factor_alone(num_steps, is_fixed):
    """Whatever of a step seems fixed: the mean of all, longer on the slow rank."""
    known = estimated(slower=2.0, noise=0.01)
    seems = replace(
        known.model,
        intercept_s=np.array([0, 0, 0, 2.0]),
        slope_s=known.model.slope_s * np.array([[1], [1], [1], [0]]),
    )
    known = replace(known, model=seems, num_steps=num_steps)

    choice = CostChoice(ALIKE).next(known, [WORK / 2], by_speed=True, always_by_cost=False)

    assert choice.is_apart
    assert (choice.model.slope_s[3] == 0).all() == is_fixed
    assert choice.model.seconds(WORK / 2) == pytest.approx([0.5, 0.5, 0.5, 2.0], rel=0.02)


def test_a_rank_without_work_in_a_step_has_a_speed_all_the_same():
    """Others took its share over, so that it has no seconds of its own in it."""
    known = replace(estimated(slower=2.0, noise=0.01), num_steps=4)
    known = replace(known, model=replace(known.model, intercept_s=np.zeros(4)))
    taken_over = WORK.copy()
    taken_over[0] += taken_over[3]
    taken_over[3] = 0

    choice = CostChoice(ALIKE).next(known, [taken_over], by_speed=True, always_by_cost=False)

    assert choice.model.seconds(WORK)[3] == pytest.approx(2.0, rel=0.02)


ROWS = [[7, 7, 7], [7], [7, 7]]


class Columns:
    """What a data set of Hugging Face answers: a column by name, a row by index."""

    def __init__(self, **columns):
        self._columns = columns
        self.column_names = list(columns)

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, key):
        if isinstance(key, str):
            return self._columns[key]
        return {"text": "abc"[key], "input_ids": ROWS[key]}


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        pytest.param(Columns(length=[3, 1, 2]), "length", id="a column of lengths"),
        pytest.param(Columns(input_ids=ROWS), "input_ids", id="of lists"),
        pytest.param(Columns(ids=[np.array(row) for row in ROWS]), "ids", id="of arrays"),
        pytest.param([{"input_ids": row} for row in ROWS], "input_ids", id="a field of samples"),
        pytest.param(Columns(text=list("abc")), "input_ids", id="made by a transform"),
    ],
)
def test_lengths_come_by_name(dataset, name):
    """The same for each kind of data set, and for a part of it."""
    lengths = Cost(name).read(dataset).of
    of_part = Cost(name).read(Subset(dataset, [2, 0])).of

    assert lengths.tolist() == [3, 1, 2]
    assert of_part.tolist() == [2, 3]


@pytest.mark.parametrize("dataset", [Columns(input_ids=ROWS), [{"input_ids": row} for row in ROWS]])
def test_what_has_no_such_name_is_refused(dataset):
    """The message says what there is."""
    with pytest.raises(ValueError, match=r"name a column .*'size' for a .*'input_ids'"):
        Cost("size").read(dataset)


SAMPLES = [{"input_ids": row, "text": "abc"} for row in ROWS]
MASK = np.array([[1, 1, 1], [1, 0, 0], [1, 1, 0]])


@pytest.mark.parametrize(
    ("of", "batch"),
    [
        pytest.param("input_ids", {}, id="a field of samples"),
        pytest.param("length", {"length": [3, 1, 2]}, id="lengths in the batch"),
        pytest.param("length", {"length": torch.tensor([3, 1, 2])}, id="a tensor of them"),
        pytest.param("ids", {"ids": ROWS}, id="lists in the batch"),
        pytest.param("mask", {"mask": torch.tensor(MASK)}, id="a mask"),
        pytest.param("mask", {"mask": torch.tensor(MASK > 0)}, id="of truth values"),
        pytest.param(lambda _, batch: batch[1].sum(1), (0, torch.tensor(MASK)), id="by batch"),
        pytest.param(
            lambda samples, _: [len(one["input_ids"]) for one in samples], None, id="by samples"
        ),
    ],
)
def test_lengths_come_from_a_batch(of, batch):
    """By name or by function, of samples or of their batch; and the batch as it is."""
    made, lengths = batch_lengths(of, SAMPLES, lambda samples: batch)

    assert made is batch
    assert lengths.tolist() == [3, 1, 2]


def test_a_collator_may_change_its_samples():
    """A field that it takes away was measured before."""
    samples = [dict(one) for one in SAMPLES]
    _, lengths = batch_lengths("input_ids", samples, lambda some: [one.clear() for one in some])

    assert lengths.tolist() == [3, 1, 2]


@pytest.mark.parametrize(
    ("of", "words"),
    [
        ("size", r"name a field of the samples, .* 'size' for a batch with \['ids'\]"),
        ("ids", r"'ids', whose rows are filled up. Name the mask"),
        (
            lambda _, batch: [3, 1],
            r"for each of the 3 samples .*int64 of shape \(2,\)",
        ),
        (lambda _, batch: [3.0, 1.0, 2.0], "integer from 0 to 16777216.*float64"),
        (lambda _, batch: [3, -1, 2], "integer from 0 to 16777216.*from -1 to 3"),
        (lambda _, batch: [3, 1 << 40, 2], "to 1099511627776. Count .* in thousands"),
    ],
)
def test_what_is_no_length_in_a_batch_is_refused(of, words):
    """With what was found, and the remedy."""
    with pytest.raises(ValueError, match=words):
        batch_lengths(of, SAMPLES, lambda samples: {"ids": torch.tensor(7 * MASK)})
