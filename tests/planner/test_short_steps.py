"""Steps of a few milliseconds are decided on together; after a level step nobody waits."""

from dataclasses import dataclass
from typing import final

import numpy as np
import pytest

from evenstep import AffineTime, Cluster, Decision, StepTimings, allocate, apportion
from evenstep._planner import Bounds, ClaimSwitch, Job, Planner, Report
from evenstep.claims import Hybrid
from evenstep.events import PolicyFailed, Rebalanced
from evenstep.policies import (
    AbstractPolicy,
    Auto,
    Deadband,
    Equal,
    Every,
    Fixed,
    LbBsp2020,
)

NOISES = {
    "lognormal": lambda rng: np.exp(0.4 * rng.standard_normal((600, 3))),
    "pauses": lambda rng: np.where(rng.random((600, 3)) < 0.05, rng.uniform(2, 20, (600, 3)), 1.0),
    "none": lambda rng: np.ones((600, 3)),
}


def timings(sizes, compute_s):
    """Return a step without waits for input."""
    return StepTimings(np.array(sizes), compute_s, data_s=np.zeros(len(sizes)))


def run(policy, fixed_s, slope_s, factors, **settings):
    """Return the sizes of each step, and after how many more of them the next plan was due."""
    planner = Planner(policy, Job(3, 96), **settings)
    sizes, holds = [planner.plan.batch_size], []
    for step, factor in enumerate(factors):
        compute_s = (fixed_s + slope_s * np.array(sizes[-1])) * factor
        planner.observe_timings(step, timings(sizes[-1], compute_s), next_step=step + 1)
        holds.append(planner.hold)
        planner.catch_up(next_step=step + 2)
        sizes.append(planner.plan.batch_size)
    return sizes, holds


@pytest.mark.parametrize("noise", ["lognormal", "pauses"])
@pytest.mark.parametrize("seed", range(3))
def test_equal_workers_keep_the_equal_split(seed, noise):
    """A few milliseconds each, mostly fixed cost, with next to nothing in them but noise."""
    factors = NOISES[noise](np.random.default_rng(seed))

    sizes, _ = run(Auto(), 1e-3, np.full(3, 2e-5), factors)

    assert set(sizes) == {(32, 32, 32)}


def test_unlike_workers_are_balanced_all_the_same():
    """Within a second: 1 to 2 ms a sample in steps of some 6 ms."""
    slope_s = np.array([5e-5, 1e-4, 2e-4])
    times = AffineTime(np.full(3, 1e-3), slope_s)
    best_s = times.seconds(allocate(times, Cluster(3, 96))).max()

    sizes, _ = run(Auto(), 1e-3, slope_s, np.ones((150, 3)))

    assert times.seconds(np.array(sizes[-1])).max() <= 1.05 * best_s


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize(
    "policy", [Auto(), Equal(), Every(Auto(), 7)], ids=["auto", "equal", "every"]
)
def test_nothing_changes_before_the_step_that_is_due(policy, noise):
    """Whatever the steps are like."""
    factors = NOISES[noise](np.random.default_rng(0)) * np.repeat([[1, 1, 1], [1, 3, 1]], 300, 0)

    sizes, holds = run(policy, 1e-3, np.array([5e-5, 1e-4, 2e-4]), factors)

    due = -1
    for step, hold in enumerate(holds):
        if step < due:
            assert sizes[step + 1] == sizes[step]
        else:
            due = step + hold
    assert sum(hold > 1 for hold in holds) > len(holds) / 2


def test_a_long_step_is_decided_on_by_itself():
    """With nothing to wait for, the third plan knows the speeds: the first step warms up."""
    sizes, holds = run(Auto(), 0.0, np.array([5e-4, 1e-3, 2e-3]), np.ones((2, 3)))

    assert sizes == [(32, 32, 32), (32, 32, 32), (55, 27, 14)]
    assert holds == [1, 1]


@pytest.mark.parametrize("policy", [LbBsp2020(), Every(LbBsp2020(), 1)], ids=lambda one: one.name)
def test_published_rules_see_each_step(policy):
    """As they were published, also in a wrapper."""
    _, holds = run(policy, 0.0, np.array([5e-5, 1e-4, 2e-4]), np.ones((20, 3)))

    assert holds == [1] * 20


def test_steps_count_for_policies_that_count_them():
    """Every seventh step is one of seven, however many are taken together."""
    factors = np.ones((70, 3))
    slope_s = np.array([5e-5, 1e-4, 2e-4])

    sizes, _ = run(Every(Auto(), 21), 0.0, slope_s, factors, warm_up_steps=0)

    changes = [step for step in range(1, 71) if sizes[step] != sizes[step - 1]]
    assert changes
    assert changes[0] in range(21, 42)


def test_plans_follow_speeds_also_where_claims_change_the_sizes_of_each_step():
    """Of 5 ms; who was slow got less by claims, and the equal plan would stay for good."""
    rng = np.random.default_rng(0)
    switch = ClaimSwitch(Hybrid(), adaptive=False)
    planner = Planner(Auto(), Job(2, 64, cuts=True), claims=switch)
    for step in range(200):
        moved = int(rng.integers(-3, 4))
        sizes = np.array([52 + moved, 12 - moved])
        reports = [
            Report(step, size, 64, seconds, 0.0)
            for size, seconds in zip(sizes.tolist(), sizes * [1e-4, 4e-4], strict=True)
        ]
        plan = planner.plan
        planner.observe(reports, next_step=step + 1)
        planner.account(reports, plan)
        planner.catch_up(next_step=step + 2)

    assert planner.plan.batch_size[0] in range(49, 54)
    assert planner.learnt()["times"]["num_steps"].min() > 5


def test_what_a_worker_without_samples_took_means_nothing():
    """Not for how many short steps are taken together either."""
    planner = Planner(Equal(), Job(3, 96, bounds=Bounds(min=0)), warm_up_steps=0)
    for step in range(4):
        shown = timings([48, 48, 0], np.array([0.002, 0.001, np.nan]))
        events = planner.observe_timings(step, shown, next_step=step + 1)

    assert events == ()


@final
@dataclass(frozen=True)
class Shown(AbstractPolicy[tuple[float, ...]]):
    """Keeps what it is shown, and moves a sample whenever the first worker's time is odd."""

    level: float = 0.1
    name = "shown"

    def init(self, cluster):
        return Decision(np.array([8, 8]), (), "start", self.level)

    def update(self, cluster, timings, state):
        seconds = float(timings.compute_s[0])
        sizes = np.array([7, 9]) if round(seconds) % 2 else np.array([8, 8])
        return Decision(sizes, (*state, seconds), "moved", self.level)


def reports(step, first_s, second_s, **changed):
    """Return what two workers with 8 samples each say of a step."""
    return [
        Report(step, 8, 16, first_s, 0.0)._replace(**changed),
        Report(step, 8, 16, second_s, 0.0),
    ]


def planner_of(policy):
    return Planner(policy, Job(2, 16), warm_up_steps=0)


def shown(planner):
    return planner.learnt()["policy_state"]


def test_a_level_step_is_shown_when_nobody_waits():
    """The plan stays; what the policy makes of the step holds one plan point later."""
    planner = planner_of(Shown())
    first = planner.plan

    events = planner.observe(reports(0, 95.0, 100.0), next_step=1)
    assert (planner.plan, events) == (first, ())
    assert planner.is_behind
    assert shown(planner) == ()

    late = planner.catch_up(next_step=2)
    assert shown(planner) == (95.0,)
    assert [type(event) for event in late] == [Rebalanced]
    assert planner.plan.first_step == 2
    assert not planner.is_behind
    assert planner.catch_up(next_step=2) == ()


def test_any_other_step_is_shown_at_once():
    """Beyond the policy's own measure."""
    planner = planner_of(Shown())

    planner.observe(reports(0, 89.0, 100.0), next_step=1)

    assert planner.plan.first_step == 1
    assert shown(planner) == (89.0,)


def test_the_next_step_makes_up_for_it():
    """In the simulator nobody is idle: no step is left out, and none comes out of turn."""
    planner = planner_of(Shown())

    for step, seconds in enumerate((96.0, 98.0, 50.0)):
        planner.observe(reports(step, seconds, 100.0), next_step=step + 1)

    assert shown(planner) == (96.0, 98.0, 50.0)


@pytest.mark.parametrize(
    "news",
    [{"holds": True}, {"capacity_bytes": 10, "peak_bytes": 9}, {"limit": 9}],
    ids=["asks to hold", "is short of memory", "found a limit"],
)
def test_who_says_more_than_a_time_is_heard_at_once(news):
    """However level the step, and whatever is level to the policy."""
    planner = planner_of(Shown(level=1.0))

    planner.observe(reports(0, 96.0, 100.0, **news), next_step=1)

    assert not planner.is_behind


def test_memory_that_says_nothing_new_is_no_reason_to_wait():
    """A GPU's peak comes with every report: the policy is asked at once where it moves a cap."""
    planner = planner_of(Shown())
    ask_at_once = []

    for step, peak_bytes in enumerate((40, 40, 40, 90, 90)):  # room for all, then for 8
        told = {"capacity_bytes": 100, "peak_bytes": peak_bytes}
        planner.observe(reports(step, 96.0, 100.0, **told), next_step=step + 1)
        ask_at_once.append(not planner.is_behind)

    assert ask_at_once == [False, False, False, True, False]


@pytest.mark.parametrize("memory", [{}, {"capacity_bytes": 10**9, "peak_bytes": 10**6}])
def test_auto_is_rarely_waited_for_by_equal_workers(memory):
    """With 1 % of noise, whether workers tell of their memory, as GPUs do, or not."""
    planner, num_behind = planner_of(Auto()), 0
    for step, seconds in enumerate(np.random.default_rng(1).lognormal(0, 0.01, (100, 2))):
        planner.observe(reports(step, *seconds.tolist(), **memory), next_step=step + 1)
        num_behind += planner.is_behind

    assert planner.plan.batch_size == (8, 8)
    assert num_behind >= 90


def test_a_worker_without_samples_is_never_level():
    """It would take part if the policy asked it to."""
    planner = planner_of(Shown())
    idle = [Report(0, 16, 16, 1.0, 0.0), Report(0, 0, 16, 1.0, 0.0)]

    planner.observe(idle, next_step=1)

    assert not planner.is_behind


def test_a_resting_policy_is_not_asked():
    """Neither at once nor later, if it takes too long."""
    planner = planner_of(Shown())

    planner.observe(reports(0, 96.0, 100.0), next_step=1, ask=False)
    assert not planner.is_behind

    planner.observe(reports(1, 96.0, 100.0), next_step=2)
    planner.catch_up(next_step=4, ask=False)
    assert shown(planner) == ()


@pytest.mark.parametrize("level", [-0.1, 1.5, float("nan")])
def test_a_level_out_of_range_fails_by_name(level):
    """As sizes that cannot be do."""
    planner = planner_of(Shown())
    planner._policy = Shown(level)

    (failed,) = planner.observe(reports(0, 50.0, 100.0), next_step=1)

    assert isinstance(failed, PolicyFailed)
    assert "level" in failed.problem


@pytest.mark.parametrize(
    ("policy", "level"),
    [
        (Equal(), 1.0),
        (Fixed((8, 8)), 1.0),
        (Deadband(Shown(0.02), 0.1), 0.02),
        (Every(Shown(0.02), 4), 0.02),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_policies_say_what_is_level_to_them(policy, level):
    """First, and after a step; what wraps a policy asks that."""
    planner = planner_of(policy)
    assert planner._level == level

    planner.observe(reports(0, 10.0, 100.0), next_step=1)

    assert planner._level == level


@pytest.mark.parametrize("policy", [Auto(), Deadband(Auto(), 0.02)], ids=lambda p: p.name)
def test_times_as_arrays_are_as_good_as_reports(policy):
    """A simulation gets the plans that a run gets."""
    by_report, by_array = planner_of(policy), planner_of(policy)
    noise = np.random.default_rng(1).lognormal(0, 0.02, (60, 2))

    for step, factors in enumerate(noise):
        assert by_report.plan == by_array.plan
        sizes = np.array(by_report.plan.batch_size)
        seconds = sizes * factors * (1.0 if step < 30 else np.array([1.0, 3.0]))
        told = [
            Report(step, int(size), 16, float(taken_s), 0.0)
            for size, taken_s in zip(sizes, seconds, strict=True)
        ]
        by_report.observe(told, next_step=step + 1)
        timings = StepTimings(sizes, seconds, np.zeros(2))
        by_array.observe_timings(step, timings, next_step=step + 1)

    assert by_report.plan.epoch > 0


HEAVY = {
    "as many tokens": lambda num_samples: 96 / num_samples,
    "samples alike": lambda num_samples: 1.0,
}


def run_uneven(slope_s, heavy, rng, *, num_steps=200):
    """Return the sizes that are planned after steps of 1 to 300 samples each."""
    planner = Planner(Auto(), Job(3, 96, varies=True))
    for step in range(num_steps):
        num_samples = int(rng.integers(1, 300))
        sizes = np.array(planner.plan.batch_size, np.float64)
        counts = apportion(sizes, Cluster(3, num_samples, 0)).tolist()
        luck = 1 + 0.03 * rng.standard_normal(3)
        took_s = np.array(counts) * slope_s * heavy(num_samples) * luck
        reports = [
            Report(step, count, num_samples, own_s, 0.0)
            for count, own_s in zip(counts, took_s.tolist(), strict=True)
        ]
        ran = planner.plan
        planner.observe(reports, next_step=step + 1)
        planner.catch_up(next_step=step + 1)
        account = planner.account(reports, ran)
        assert account.batch_size == tuple(counts)
        if step > 50 and num_samples > 50:
            equal_s = num_samples / 3 * max(slope_s) * heavy(num_samples)
            assert account.equal_split_s == pytest.approx(equal_s, rel=0.2)
    return planner.plan.batch_size


@pytest.mark.parametrize("heavy", HEAVY)
def test_steps_of_any_size_teach_how_ranks_compare(heavy):
    """Whether a batch of more samples takes longer or not."""
    slope_s = np.array([4e-3, 2e-3, 1e-3])

    sizes = run_uneven(slope_s, HEAVY[heavy], np.random.default_rng(1))

    assert max(sizes * slope_s) <= 1.08 * 96 / (1 / slope_s).sum()


@pytest.mark.parametrize("heavy", HEAVY)
@pytest.mark.parametrize("seed", range(3))
def test_equal_workers_keep_the_equal_split_in_steps_of_any_size(heavy, seed):
    """What differs between steps is no difference between ranks."""
    sizes = run_uneven(np.full(3, 2e-3), HEAVY[heavy], np.random.default_rng(seed))

    assert sizes == (32, 32, 32)


@pytest.mark.parametrize(("varies", "caps"), [(True, (40, 90, 200)), (False, None)])
def test_plans_for_steps_of_any_size_hold_the_caps_of_plain_loops(varies, caps):
    """For steps that are larger; those of the planned size keep to them anyway."""
    job = Job(3, 96, bounds=Bounds(max=(40, 90, 200)), varies=varies)

    assert Planner(Equal(), job).plan.max_forward == caps
