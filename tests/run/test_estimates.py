"""What was learnt, as a checkpoint holds it, in plain values that survive being written."""

from __future__ import annotations

import copy
import json
from collections import namedtuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep._planner import Job, Planner, Report
from evenstep._run._estimates import Estimates, decode, encode
from evenstep.exceptions import EvenstepWarning
from evenstep.policies import (
    Auto,
    Deadband,
    DynamicBatching,
    Equal,
    Every,
    Fixed,
    Lbb,
    LbBsp2020,
)

POLICIES = (
    Auto(),
    Deadband(LbBsp2020(), 0.1),
    DynamicBatching(),
    Equal(),
    Every(Lbb(), 2),
    Fixed((5, 10, 15)),
    LbBsp2020(),
    Lbb(),
)
WORKERS = ("n1 cuda GPU-a", "n1 cuda GPU-b", "n2 cpu")


def learnt(policy=None, *, num_steps=20):
    """What a planner has learnt about three workers."""
    planner = Planner(policy or Auto(), Job(3, 30))
    for step in range(num_steps):
        sizes = planner.plan.batch_size
        reports = [
            Report(step, b, 30, 0.001 + b * 0.001 * (rank + 1), 0.0) for rank, b in enumerate(sizes)
        ]
        planner.observe(reports, next_step=step + 1)
        planner.account(reports, planner.plan)
    return planner.learnt()


def written_and_read(state):
    """As a text: no format of files holds less."""
    return json.loads(json.dumps(state))


def begun(state, workers):
    """A planner for ``workers`` that goes on from ``state``, and the event."""
    planner = Planner(Auto(), Job(len(workers), 30))
    event = Estimates.read(state).apply(planner, workers)
    return planner, event


@pytest.mark.parametrize("num_steps", range(6))
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_every_policy_goes_on_from_what_it_saved(policy, num_steps):
    """After however many steps, infinities in its state included."""
    state = Estimates(WORKERS, learnt(policy, num_steps=num_steps)).state_dict()
    estimates = Estimates.read(written_and_read(state))
    planner = Planner(policy, Job(3, 30))

    assert estimates.apply(planner, WORKERS).policy == "resumed"
    assert planner.plan.batch_size == tuple(estimates.learnt["batch_size"])


def test_estimates_follow_host_and_device():
    """Not the rank: after a restart with other numbers, each worker has its own again."""
    state = written_and_read(Estimates(WORKERS, learnt()).state_dict())
    same, event = begun(state, WORKERS)
    assert event.policy == "resumed"

    turned, event = begun(state, WORKERS[::-1])
    assert event.policy == "rehearsed"
    held = np.array(same.plan.batch_size)
    assert abs(np.array(turned.plan.batch_size)[::-1] - held).max() <= 1

    _, event = begun(state, ("n1 cuda GPU-b", "n3 cpu"))
    assert (event.policy, event.known) == ("anew", (True, False))


class Odd(Auto):
    """Keeps more in its state than can be written."""

    def init(self, cluster):
        decision = super().init(cluster)
        decision.state["me"] = self
        return decision

    def update(self, cluster, timings, state):
        decision = super().update(cluster, timings, state)
        decision.state["me"] = self
        return decision


def test_a_policy_whose_state_cannot_be_written_costs_the_speeds_nothing():
    """A warning names it, and the next run is balanced from the speeds."""
    with pytest.warns(
        EvenstepWarning, match=r"state of the policy Odd\(.*is not saved: .* hold tuples and dicts"
    ):
        state = Estimates(WORKERS, learnt(Odd())).state_dict()
    planner, event = begun(written_and_read(state), WORKERS)

    assert event.policy == "rehearsed"
    assert planner.plan.batch_size[0] > planner.plan.batch_size[2]


class Broken(Auto):
    """Cannot go on from anything."""

    def update(self, cluster, timings, state):
        raise ZeroDivisionError("no speed")


def test_a_policy_that_fails_on_what_is_known_is_said_to():
    """It starts anew, with equal sizes, and the warning has its error."""
    planner = Planner(Broken(), Job(3, 30))
    with pytest.warns(EvenstepWarning, match=r"starts anew, .*ZeroDivisionError: no speed"):
        event = Estimates(WORKERS, learnt()).apply(planner, WORKERS)

    assert (event.policy, event.batch_size) == ("anew", (10, 10, 10))


def places_in(value, path=()):
    """Every place in a nested state."""
    yield path
    items = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        items = enumerate(value)
    for key, item in items:
        yield from places_in(item, (*path, key))


def put(value, path, new):
    """A copy of a nested state with another value at one place."""
    if not path:
        return new
    changed = copy.copy(value)
    changed[path[0]] = put(value[path[0]], path[1:], new)
    return changed


STATE = written_and_read(Estimates(WORKERS, learnt()).state_dict())
PLACES = list(places_in(STATE))


@given(
    place=st.sampled_from(PLACES),
    new=st.sampled_from(
        [
            *(None, 3, -1, "x", 0.5, float("nan"), [], {}, (), object()),
            *(
                np.ones(2),
                [1],
                [3],
                [7, 3, 3],
                10**400,
                "<i8",
                "O",
                "array",
                ["array", "<f8", [2], [1, 2]],
            ),
            *(["array", "<f8", [3], [value] * 3] for value in (float("nan"), -1, 1e300)),
        ]
    ),
)
def test_a_broken_state_is_refused_or_of_use(place, new):
    """Nothing but the documented error comes of it, then or when the run begins."""
    state = put(STATE, place, new)
    try:
        estimates = Estimates.read(state)
    except ValueError as error:
        assert "must come from `Balancer.state_dict()`" in str(error)  # noqa: PT017
        return
    planner = Planner(Auto(), Job(3, 30))
    estimates.apply(planner, WORKERS)
    assert sum(planner.plan.batch_size) == 30


Pair = namedtuple("Pair", "a b")


def test_plain_values_come_back_as_they_were():
    """Types, shapes and bits included, with nothing but lists and dicts in between."""
    table = np.array([[0.1, np.nan], [-0.0, np.inf]], np.float32)
    state = {"count": 3, "inner": (None, True, "x", 0.1, (), {}), "table": table, "no": table[:0]}

    written = encode(state)
    back = decode(written)

    assert written["inner"] == ["tuple", None, True, "x", 0.1, ["tuple"], {}]
    assert back["count"] == 3
    assert back["inner"] == state["inner"]
    assert back["table"].dtype == np.float32
    assert back["table"].tobytes() == table.tobytes()
    assert back["no"].shape == (0, 2)


@pytest.mark.parametrize(
    "value",
    [
        [1, 2],
        {1: 2},
        {1, 2},
        Pair(1, 2),
        np.float64(1.0),
        np.array([None]),
        np.array(["a"]),
        object(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_anything_else_is_refused_by_its_place(value):
    """The message says where in the state it sits."""
    with pytest.raises(ValueError, match=r"None only, got .* at state\['deep'\]\[1\]\."):
        encode({"deep": (0, value)})
