"""Samples of unlike lengths: the planners of training, and a bound that nothing beats."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import Cluster, sim
from evenstep.claims import Hybrid
from evenstep.policies import Equal
from evenstep.torch import Cost

from .._tiers import slow_but

LEARNT = 24  # steps


def workers(speeds, num_steps, *, intercept_s=0.0, jitter=0.0):
    """Workers of constant speeds, at 10 ms a sample of mean cost."""
    slope_s = np.tile(0.01 / np.array(speeds, float), (num_steps, 1))
    luck = np.exp(jitter * np.random.default_rng(0).standard_normal(slope_s.shape))
    return sim.Scenario("mine", np.full(len(speeds), intercept_s), slope_s, luck)


def mean_steps(workload):
    """Mean step once costs are learnt: equal, by speed alone, by length alone, by both; bound."""
    cluster = Cluster(workload.world_size, workload.global_batch_size)
    asked = product((None, workload.lengths), ("equal", "auto"))
    found = [sim.run(policy, cluster, workload, cost=cost).step_s for cost, policy in asked]
    bound = [workload.lower_bound_s(step)[0] for step in range(workload.num_steps)]
    assert all((step_s >= np.array(bound) * (1 - 1e-12)).all() for step_s in found)
    return [float(np.mean(step_s[LEARNT:])) for step_s in (*found, bound)]


@pytest.mark.parametrize(
    ("lengths", "padded"),
    slow_but(
        [("long-tails", True)],
        product(("fine-tuning", "long-tails", "uniform"), (False, True)),
    ),
)
def test_both_save_at_least_what_each_saves_alone(lengths, padded):
    """On average over clusters, within 2 %; and no step of any plan ends before its bound.

    Not in each: in one of a hundred, the first steps tell a wrong cost that stays for a while.
    """
    rng, found = np.random.default_rng(0), []
    for seed in range(6):
        speeds = rng.integers(1, 5, rng.integers(2, 7))
        jitter, total = rng.choice([0.0, 0.05]), len(speeds) * int(rng.integers(4, 25))
        scenario = workers(speeds, 64, intercept_s=0.005, jitter=jitter)
        work = scenario.with_lengths(lengths, total, padded=padded, seed=seed)
        found.append(mean_steps(work))
    equal, by_speed, by_length, both, bound = np.array(found).T

    assert (both / by_speed).mean() <= 1.02
    assert (both / by_length).mean() <= 1.02
    assert (both / np.minimum(by_speed, by_length)).mean() <= 1.02
    assert (bound <= np.minimum(both, equal)).all()


@pytest.mark.parametrize("padded", [False, True])
def test_lengths_and_speeds_are_told_apart(padded):
    """Speeds 1:1:2:4, 32 samples: both reach the bound, and neither alone does."""
    work = workers((1, 1, 2, 4), 80).with_lengths("fine-tuning", 32, padded=padded)
    equal, by_speed, by_length, both, bound = mean_steps(work)

    assert equal > 1.15 * max(by_speed, by_length)
    assert min(by_speed, by_length) > 1.3 * bound
    assert both < 1.01 * bound


def test_on_equal_workers_lengths_do_it_alone():
    """Balancing speeds that are equal saves nothing."""
    work = workers((1, 1, 1, 1), 60).with_lengths("fine-tuning", 32)
    equal, by_speed, by_length, both, bound = mean_steps(work)

    assert by_speed == pytest.approx(equal, rel=0.05)
    assert equal > 1.3 * bound
    assert max(by_length, both) < 1.01 * bound


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    speeds=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    intercept_s=st.sampled_from([0.0, 0.02]),
    padded=st.booleans(),
)
def test_the_bound_is_below_every_assignment(lengths, speeds, intercept_s, padded):
    """All of them tried. Where samples are padded, the best one is the bound."""
    scenario = workers(speeds, 1, intercept_s=intercept_s)
    work = scenario.with_lengths(lengths, len(lengths), padded=padded, hidden_size=1)
    every = product(range(len(speeds)), repeat=len(lengths))
    best = min(work.assigned_s(0, np.array(owner)).max() for owner in every)
    bound, reason = work.lower_bound_s(0)

    assert bound <= best * (1 + 1e-12)
    if padded:
        assert bound >= best * (1 - 2e-4)
        assert reason == "runs"


def test_a_single_long_sample_is_the_bound():
    """On the fastest worker; and the bound of many equal ones is their work over all speeds."""
    work = workers((1, 4), 1).with_lengths([1, 1, 1000, 1], 4, hidden_size=0)
    equal = workers((1, 4), 1).with_lengths([7] * 20, 20)

    assert work.lower_bound_s(0) == (pytest.approx(0.01 / 4 * 1000 / 1003 * 4), "sample")
    assert equal.lower_bound_s(0) == (pytest.approx(0.01 * 20 / 5), "work")


def test_workers_of_many_speeds_have_a_bound_too():
    """Without padding, where 20 different workers have too many orders."""
    work = workers(range(1, 21), 1).with_lengths("fine-tuning", 80, padded=True)

    assert work.lower_bound_s(0)[1] in ("work", "sample")


def test_wrong_lengths_cost_speed_alone():
    """With lengths that tell nothing, plans count samples again: no worse than by speed."""
    work = workers((1, 1, 2, 4), 240).with_lengths("uniform", 32)
    wrong = np.random.default_rng(5).permutation(work.lengths)
    cluster = Cluster(4, 32)
    by_speed, misled = [sim.run("auto", cluster, work, cost=cost) for cost in (None, wrong)]

    assert misled.step_s[60:].mean() < 1.05 * by_speed.step_s[60:].mean()
    assert "by count" in misled.reasons[-1]


def test_a_rank_that_slows_down_is_followed():
    """Workers whose speeds change, as in any scenario: within 10 % of the bound 30 steps later."""
    slope_s = workers((1, 1, 2, 4), 90).slope_s.copy()
    slope_s[40:, 3] *= 2
    scenario = sim.Scenario("slows", np.zeros(4), slope_s, np.ones((90, 4)))
    work = scenario.with_lengths("fine-tuning", 64)
    step_s = sim.run("auto", Cluster(4, 64), work, cost=work.lengths).step_s
    over = step_s / [work.lower_bound_s(step)[0] for step in range(90)]

    assert over[41:44].mean() > 1.3
    assert over[70:].mean() < 1.1


def test_without_attention_costs_grow_with_the_length():
    """A sample of mean cost takes what it takes without lengths, whatever the hidden size."""
    linear = workers((1,), 1).with_lengths([10, 30], 2, hidden_size=0)
    square = workers((1,), 1).with_lengths([10, 30], 2, hidden_size=1)

    assert linear.weight.tolist() == [0.5, 1.5]
    assert square.weight[1] / square.weight[0] == pytest.approx((30 + 900 / 6) / (10 + 100 / 6))
    assert square.assigned_s(0, np.zeros(2, int)).tolist() == [pytest.approx(0.02)]


def test_a_run_is_the_same_again():
    """Same arguments, same report; another seed, other samples."""
    reports = []
    for seed in (0, 0, 1):
        work = workers((1, 2), 30, jitter=0.1).with_lengths("long-tails", 16, seed=seed)
        reports.append(sim.run("auto", Cluster(2, 16), work, cost=work.lengths))

    assert reports[0].step_s.tolist() == reports[1].step_s.tolist()
    assert reports[0].step_s.tolist() != reports[2].step_s.tolist()
    assert (reports[0].batch_size.sum(axis=1) == 16).all()
    assert reports[0].reasons[-1].startswith("by cost")


def test_each_sample_comes_once_an_epoch():
    """The order is drawn anew in each."""
    work = workers((1,), 6).with_lengths(range(1, 9), 4)

    for epoch in (0, 2, 4):
        assert sorted(work.order[epoch : epoch + 2].ravel()) == list(range(8))
    assert work.order[:2].tolist() != work.order[2:4].tolist()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"policy": "lbb"}, "'auto' or 'equal'"),
        ({"cost": Cost([5] * 8, max_size=10)}, "no caps"),
        ({"cost": Cost([5] * 8, padded=True)}, "padded as the workload"),
        ({"cost": [5] * 7}, "8 samples"),
        ({"cluster": Cluster(2, 6)}, "4 samples"),
        ({"cluster": Cluster(2, 4, max_batch_size=3)}, "no bounds"),
        ({"workload": workers((1, 2), 3).workload}, "with_lengths"),
    ],
)
def test_what_does_not_go_with_a_cost_is_refused(settings, words):
    """In words that name the argument."""
    work = workers((1, 2), 3).with_lengths([3] * 8, 4)
    asked = {"policy": Equal(), "cluster": Cluster(2, 4), "workload": work, "cost": [3] * 8}

    with pytest.raises(ValueError, match=words):
        sim.run(**{**asked, **settings})


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("spot", {}, "presence"),
        ("capped", {}, "max_batch_size"),
        ("saturated", {}, "saturation"),
        ("static", {"lengths": "short"}, "'short'"),
        ("static", {"lengths": [0, 1]}, "at least 1"),
        ("static", {"lengths": [[1, 2]]}, "one for each sample"),
        ("static", {"global_batch_size": 0}, "global_batch_size"),
        ("static", {"hidden_size": -1}, "hidden_size"),
    ],
)
def test_lengths_that_cannot_be_are_refused(name, settings, words):
    """So are scenarios that they do not go together with."""
    asked = {"lengths": "uniform", "global_batch_size": 16, **settings}

    with pytest.raises(ValueError, match=words):
        sim.scenario(name, 2, 4).with_lengths(**asked)


def test_schemes_leave_samples_where_they_are():
    """A claim counts samples."""
    work = workers((1, 2), 3).with_lengths([3] * 8, 4)
    with pytest.raises(ValueError, match="scheme"):
        sim.run("auto", Cluster(2, 4), work, scheme=Hybrid())
    with pytest.raises(ValueError, match="scheme"):
        sim.run("auto", Cluster(2, 4), work, scheme=Hybrid(), cost=[3] * 8)


@pytest.mark.parametrize("policy", ["auto", "equal"])
def test_samples_that_cost_the_same_are_counted(policy):
    """By the policy itself, as in training: the same run as without costs."""
    work = workers((1, 1, 2, 4), 40, jitter=0.05).with_lengths([20], 32)
    cluster = Cluster(4, 32)
    counted, by_cost = [sim.run(policy, cluster, work, cost=one) for one in (None, work.lengths)]

    assert by_cost.step_s.tolist() == counted.step_s.tolist()
    assert by_cost.reasons == counted.reasons
