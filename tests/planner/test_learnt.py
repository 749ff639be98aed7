"""What a run has learnt follows workers to other ranks; a mistake leaves nothing half changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import AffineTime, Decision, policies
from evenstep._planner import Bounds, EqualSizes, Job, Planner, Report, UserMistake, blaming, places
from evenstep.events import PolicyFailed, StepMeasured
from evenstep.policies import AbstractPolicy, Auto, Deadband, Every, Fixed, Lbb, LbBsp2018
from evenstep.prediction import AbstractPredictor, Ema

SLOPE_S = np.array([0.001, 0.002, 0.004, 0.008])


def trained(policy, slope_s=SLOPE_S, *, num_steps=200, size=60):
    """A planner that has seen workers of these slopes for some steps."""
    planner = Planner(policy, Job(len(slope_s), size))
    for step in range(num_steps):
        observe(planner, step, slope_s, size)
    return planner


def observe(planner, step, slope_s, size=60, **memory):
    sizes = planner.plan.batch_size
    reports = [
        Report(step, batch, size, compute_s=0.002 + batch * slope, data_s=0.0, **memory)
        for batch, slope in zip(sizes, slope_s, strict=True)
    ]
    planner.observe(reports, next_step=step + 1)
    planner.account(reports, planner.plan)


def cost(planner, slope_s):
    return max(0.002 + b * c for b, c in zip(planner.plan.batch_size, slope_s, strict=True))


def test_the_same_workers_go_on_with_the_very_state():
    """Every later decision is the one that an unbroken run would have made."""
    unbroken = trained(Auto())
    resumed = Planner(Auto(), Job(4, 60))
    event = resumed.restore(unbroken.learnt(), np.arange(4))

    assert (event.policy, event.known) == ("resumed", (True,) * 4)
    assert resumed.plan.batch_size == unbroken.plan.batch_size
    changed = SLOPE_S[::-1]
    observe(resumed, 0, SLOPE_S)  # the first step warms up and is not shown
    for step in range(1, 30):
        observe(unbroken, step, changed)
        observe(resumed, step, changed)
        assert resumed.plan.batch_size == unbroken.plan.batch_size


@pytest.mark.parametrize("name", sorted(set(policies.__all__) & {"Auto", "Lbb", "LbBsp2020"}))
@pytest.mark.parametrize("former", [(3, 1, 0, 2), (0, 3), (2, 0, 1)])
def test_renumbered_or_fewer_workers_begin_balanced(name, former):
    """The first plan suits the workers as they are numbered now: no step on the equal split."""
    policy = getattr(policies, name)()
    before = trained(policy)
    now = Planner(policy, Job(len(former), 60))
    event = now.restore(before.learnt(), np.array(former))
    slope_s = SLOPE_S[list(former)]
    equal_s = 0.002 + 60 / len(former) * slope_s.max()
    ideal_s = 0.002 + 60 / (1 / slope_s).sum()

    assert event.policy == "rehearsed"
    assert event.batch_size == now.plan.batch_size
    share = 0.05 if name != "LbBsp2020" else 0.8  # which moves a few samples at a time
    assert cost(now, slope_s) < ideal_s + share * (equal_s - ideal_s)


def test_a_new_worker_means_the_policy_begins_anew():
    """Nobody knows how fast it is; the others' times stay known, for what steps would cost."""
    now = Planner(Auto(), Job(5, 60))
    event = now.restore(trained(Auto()).learnt(), np.array([0, 1, -1, 2, 3]))

    assert event.policy == "anew"
    assert event.known == (True, True, False, True, True)
    assert now.plan.batch_size == (12,) * 5
    for step in range(3):
        observe(now, step, np.array([0.001, 0.002, 0.001, 0.004, 0.008]))
    assert now.plan.batch_size != (12,) * 5


def test_other_policies_and_global_batches_begin_balanced_too():
    """Speeds are speeds, whoever measured them."""
    before = trained(Auto()).learnt()
    for policy, size in ((policies.Lbb(), 60), (Auto(), 120)):
        now = Planner(policy, Job(4, size))
        assert now.restore(before, np.arange(4)).policy == "rehearsed"
        assert cost(now, SLOPE_S) < 0.002 + 1.1 * size / (1 / SLOPE_S).sum()


def test_noisy_workers_begin_balanced_too():
    """A fifth of noise, as on shared CPUs: what a rehearsal rounds to 0 is no problem."""
    before, now = (Planner(Auto(), Job(4, 60)) for _ in range(2))
    noise = np.exp(0.2 * np.random.default_rng(0).standard_normal((20, 4)))
    for step, factors in enumerate(noise):
        observe(before, step, factors * SLOPE_S)

    event = now.restore(before.learnt(), np.array([3, 1, 0, 2]))

    assert (event.policy, event.problem) == ("rehearsed", "")


class Broken(policies.Equal):
    """Cannot go on from anything."""

    def update(self, cluster, timings, state):
        raise ZeroDivisionError


def test_a_policy_that_fails_on_what_is_known_begins_anew():
    """And training with it."""
    now = Planner(Broken(), Job(4, 60))
    learnt = trained(Auto()).learnt() | {"policy": repr(Broken())}

    event = now.restore(learnt, np.arange(4))
    assert (event.policy, event.problem) == ("anew", "ZeroDivisionError")
    assert now.plan.batch_size == (15,) * 4


def test_peaks_of_memory_follow_the_worker():
    """So that the first plan after a restart keeps to what fits."""
    before = Planner(Auto(), Job(4, 60))
    for step in range(40):
        sizes = before.plan.batch_size
        room = [1100, 10_000, 10_000, 10_000]  # worker 0 is the fast one, and has little
        reports = [
            Report(step, b, 60, 0.002 + b * c, 0.0, peak_bytes=50 * b, capacity_bytes=r)
            for b, c, r in zip(sizes, SLOPE_S, room, strict=True)
        ]
        before.observe(reports, next_step=step + 1)
        before.account(reports, before.plan)
    now = Planner(Auto(), Job(4, 60))
    now.restore(before.learnt(), np.array([1, 2, 3, 0]))

    cap = before.plan.batch_size[0]
    assert cap * 50 <= 1100
    assert now.plan.batch_size[3] <= 1100 / 50
    other = Planner(Auto(), Job(3, 60))
    other.restore(before.learnt(), np.array([0, 1, 2]))
    assert other.plan.batch_size[0] > 1100 / 50  # sharded models take more on fewer: forgotten


@given(st.lists(st.sampled_from("abc"), max_size=8), st.lists(st.sampled_from("abcd"), max_size=8))
def test_each_worker_finds_its_own_place_once(before, now):
    """Names that occur several times are dealt in order; nobody gets another's."""
    found = places(before, now).tolist()
    taken = [place for place in found if place >= 0]

    assert len(set(taken)) == len(taken)
    for name, place in zip(now, found, strict=True):
        assert place < 0 or before[place] == name
    for name in set(before) & set(now):
        held = [place for place, mine in zip(found, now, strict=True) if mine == name]
        known = [place for place in held if place >= 0]
        assert len(known) == min(before.count(name), now.count(name))
        assert known == sorted(known)


@final
@dataclass(frozen=True)
class Mine(AbstractPolicy[int]):
    """A user's: gives what it is told to."""

    gives: Any = None
    name = "mine"

    def init(self, cluster):
        return Decision(np.array([8, 8]), 0, "start")

    def update(self, cluster, timings, state):
        given = self.gives
        return given() if callable(given) else given


class Guess(AbstractPredictor[None]):
    """A user's predictor, for a policy of evenstep's."""

    name = "guess"

    def init(self, world_size):
        return None

    def update(self, state, values, resources=None):
        return None

    def predict(self, state):
        raise LookupError("no idea")


class Unspeakable:
    """A reason that cannot be said."""

    def __str__(self):
        raise UnicodeError("no words")


OWN = [
    Auto(),
    Deadband(Every(Auto(), 3), 0.05),
    LbBsp2018(predictor=Ema(1.0)),
    Lbb(intercept_s=(0.1, 0.2)),
    LbBsp2018(profile=AffineTime(np.zeros(2), np.ones(2))),
]
USERS = [Mine(), Deadband(Mine(), 0.05), LbBsp2018(predictor=Guess()), lambda: 1]


@pytest.mark.parametrize("part", OWN, ids=repr)
def test_what_is_evensteps_own_with_all_its_parts_is_not_blamed(part):
    """The exception comes out as it was."""
    with pytest.raises(KeyError, match="lost"), blaming(part):
        raise KeyError("lost")


@pytest.mark.parametrize("part", USERS, ids=lambda part: type(part).__name__)
def test_what_a_user_brings_is_named(part):
    """Also inside of something that is evenstep's."""
    with pytest.raises(UserMistake, match="KeyError: 'lost'") as caught, blaming(part):
        raise KeyError("lost")

    assert caught.value.part == type(part).__name__


def observed(planner, num_steps=3):
    """Show a planner of two workers some steps; return the events."""
    events = []
    for step in range(num_steps):
        sizes = planner.plan.batch_size
        reports = [Report(step, sizes[r], 16, 0.1 * (1 + r) * sizes[r], 0.0) for r in (0, 1)]
        events += planner.observe(reports, next_step=step + 1)
    return events


@pytest.mark.parametrize(
    ("gives", "problem"),
    [
        (lambda: 1 // 0, "ZeroDivisionError: integer division or modulo by zero"),
        (None, "TypeError: Mine gave None, not a `Decision`"),
        (Decision([8, 8], 1, "list"), "TypeError: Mine gave [8, 8], not an array of 2 integers"),
        (Decision(np.array([8, 9]), 1, "more"), "ValueError: Mine gave [8, 9], which add up to 17"),
        (Decision(np.array([8, 8]), 1, Unspeakable()), "UnicodeError: no words"),
        (Decision(np.array([8, 8]), 1, "level", 2.0), "ValueError: Mine gave a level of 2.0"),
    ],
    ids=["raises", "None", "list", "sum", "reason", "level"],
)
def test_a_users_policy_is_named_and_its_state_is_the_last_good_one(gives, problem):
    """Whichever way it broke its contract."""
    planner = Planner(Mine(gives), Job(2, 16))

    events = observed(planner)

    assert [type(event) for event in events] == [PolicyFailed] * 2
    assert events[0].policy == "Mine"
    assert events[0].problem.startswith(problem)
    assert planner.learnt()["policy_state"] == 0
    assert planner.plan.epoch == 0


def test_a_users_part_of_a_policy_is_blamed_by_that_policys_name():
    """`LbBsp2018` with a predictor that raises."""
    events = observed(Planner(LbBsp2018(predictor=Guess()), Job(2, 16)))

    assert {(event.policy, event.problem) for event in events} == {
        ("LbBsp2018", "LookupError: no idea")
    }


def test_a_policy_of_evensteps_own_raises_and_the_state_is_the_last_good_one():
    """The driver has to know: all other ranks rely on what is planned."""
    policy = LbBsp2018(profile=AffineTime(np.zeros(2), np.array([1.0, 3.0])))
    planner = Planner(policy, Job(2, 16))
    before = planner.learnt()["policy_state"], planner.plan
    object.__setattr__(policy, "profile", "lost")

    with pytest.raises(AttributeError):
        observed(planner)
    assert (planner.learnt()["policy_state"], planner.plan) == before


class NoClaims:
    """Marks the first plan, and fails at any other."""

    def marked(self, plan):
        if plan.epoch:
            raise IndexError("no such sample")
        return plan


def test_a_plan_that_cannot_be_made_leaves_the_state_of_before():
    """The policy has decided well: what came after it failed."""
    planner = Planner(Mine(Decision(np.array([7, 9]), 1, "moved")), Job(2, 16), claims=NoClaims())

    with pytest.raises(IndexError, match="no such sample"):
        observed(planner)

    assert planner.learnt()["policy_state"] == 0
    assert planner.plan.epoch == 0


def test_equal_sizes_keep_to_bounds_and_to_memory():
    """A worker that fits three samples gets no eight; the tail is equal too."""
    bounds = Bounds(max=(16, 3))
    planner = Planner(Fixed((14, 2)), Job(2, 16, tail_size=6, bounds=bounds))

    equal = EqualSizes(planner, 7)

    assert equal.plan.batch_size == (13, 3)
    assert equal.plan.tail == (5, 1)
    assert (equal.plan.epoch, equal.plan.first_step, equal.plan.first) == (1, 7, None)
    assert "balancing is off" in equal.plan.reason


def test_after_that_steps_are_measured_and_nothing_is_decided():
    """What a driver asks of a planner is answered, by nothing where nothing is known."""
    equal = EqualSizes(Planner(Fixed((12, 4)), Job(2, 16)), 3)
    reports = [Report(5, 8, 16, 1.0, 0.0), Report(5, 8, 16, 2.0, 0.0)]

    measured = equal.account(reports, equal.plan)

    assert isinstance(measured, StepMeasured)
    assert measured.compute_s == (1.0, 2.0)
    assert measured.equal_split_s is None
    plan = equal.plan
    assert equal.observe(reports, next_step=6) == equal.catch_up(next_step=9) == ()
    assert equal.plan is plan
    assert equal.burden(50) is equal.learnt() is None
