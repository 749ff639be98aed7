"""A mistake is the user's or evenstep's own, and leaves nothing half changed."""

from dataclasses import dataclass
from typing import Any, final

import numpy as np
import pytest

from evenstep import AffineTime, Decision
from evenstep._planner import Bounds, EqualSizes, Job, Planner, Report, UserMistake, blaming
from evenstep.events import PolicyFailed, StepMeasured
from evenstep.policies import AbstractPolicy, Auto, Deadband, Every, Fixed, Lbb, LbBsp2018
from evenstep.prediction import AbstractPredictor, Ema


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
        events += planner.observe(reports, next_step=step + 1).events
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
    assert equal.observe(reports, next_step=6).plan is equal.plan
    assert equal.catch_up(next_step=9).events == ()
    assert equal.burden(50) is equal.learnt() is None
