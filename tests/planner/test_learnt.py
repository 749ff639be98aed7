"""What a run has learnt follows the workers to other ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import policies
from evenstep._planner import Job, Planner, Report, places
from evenstep.policies import Auto

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
