"""A balancer's state: of plain values, by host and device, and refused where it is broken."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep._planner import Job, Planner, Report
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
    RoundTo,
)
from evenstep.testing import run_workers
from evenstep.torch import Balancer
from evenstep.torch._estimates import Estimates

from .restarts import speeds

POLICIES = (
    Auto(),
    Deadband(LbBsp2020(), 0.1),
    DynamicBatching(),
    Equal(),
    Every(Lbb(), 2),
    Fixed((5, 10, 15)),
    LbBsp2020(),
    Lbb(),
    RoundTo(Lbb(), 2),
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
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


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


@pytest.mark.cluster
def test_a_restarted_run_begins_with_the_sizes_it_had():
    """Its first step is balanced, where a new run's is not."""
    (state, before, nothing), (elsewhere, _, _) = run_workers(2, speeds, None, 1)
    assert nothing == []
    assert before[0] == (12, 12)
    assert before[-1][1] < 8
    assert elsewhere["learnt"] is None  # rank 0 plans, and writes checkpoints

    (_, after, (event,)), _ = run_workers(2, speeds, written_and_read(state), 1)
    assert (event.policy, event.known) == ("resumed", (True, True))
    assert after[0] == event.batch_size
    assert after[0][1] < 8


def test_before_a_run_there_is_nothing_to_know():
    """A state of nothing loads, and changes nothing."""
    state = written_and_read(Balancer().state_dict())
    Balancer().load_state_dict(state)

    assert Estimates.read(state).apply(Planner(Auto(), Job(2, 8)), ("a", "b")) is None


def test_what_was_loaded_is_saved_again_before_the_first_step():
    """A run that is stopped before it has begun forgets nothing."""
    state = Estimates(WORKERS, learnt()).state_dict()
    balancer = Balancer()
    balancer.load_state_dict(state)

    assert balancer.state_dict()["workers"] == list(WORKERS)


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
    with pytest.warns(EvenstepWarning, match=r"state of the policy Odd\(.*is not saved: it holds"):
        state = Estimates(WORKERS, learnt(Odd())).state_dict()
    planner, event = begun(written_and_read(state), WORKERS)

    assert event.policy == "rehearsed"
    assert planner.plan.batch_size[0] > planner.plan.batch_size[2]


def places_in(value, path=()):
    """Every place in a nested state."""
    yield path
    items = value.items() if isinstance(value, dict) else ()
    if isinstance(value, (list, tuple)):
        items = enumerate(value)
    for key, item in items:
        yield from places_in(item, (*path, key))


def put(value, path, new):
    """A copy of a nested state with another value at one place."""
    if not path:
        return new
    if isinstance(value, tuple):
        return tuple(put(v, path[1:], new) if k == path[0] else v for k, v in enumerate(value))
    changed = copy.copy(value)
    changed[path[0]] = put(value[path[0]], path[1:], new)
    return changed


STATE = Estimates(WORKERS, learnt()).state_dict()
PLACES = list(places_in(STATE))


@given(
    place=st.sampled_from(PLACES),
    new=st.sampled_from(
        [
            *(None, 3, -1, "x", 0.5, float("nan"), [], {}, (), object()),
            *(torch.ones(2), torch.tensor(1), torch.zeros((7, 3, 3), dtype=torch.float64)),
            *(torch.full((3,), value, dtype=torch.float64) for value in (float("nan"), -1, 1e300)),
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


@pytest.mark.parametrize(
    "state", [None, [], {}, {"format": "x"}, {"format": "evenstep-balancer-2"}]
)
def test_something_else_is_refused(state):
    """With what to do instead."""
    with pytest.raises(ValueError, match=r"Balancer.load_state_dict.*measured again within"):
        Balancer().load_state_dict(state)


def test_a_run_under_way_takes_no_state():
    """It would come too late."""
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    with Balancer() as balancer:
        loader = DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=4)
        model, loader = balancer.prepare(nn.Linear(2, 1), loader)
        for (x,) in loader:
            model(x).mean().backward()
        with pytest.raises(ValueError, match="come before the first loop"):
            balancer.load_state_dict(STATE)
