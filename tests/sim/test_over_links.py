"""Sizes and shares side by side in the simulator: what the planners say is what happens."""

import numpy as np
import pytest

from evenstep import AffineTime, Cluster
from evenstep.control import JointSizes, SharePlanner, plan_jointly
from evenstep.events import JointlyPlanned
from evenstep.sharding import Aggregation, Links, OptimalShares
from evenstep.sim import Workload, run_over_links

SPEEDS = np.array([20.0, 30, 60, 80])
FIXED_S, STEPS, CLUSTER = np.full(4, 0.02), 60, Cluster(4, 64)


def ran(mbit, chunks, *, joint, noise=0.0, jitter=0.0, policy="lbb", steps=STEPS):
    """A run on steady links; policies balance exactly unless there is jitter."""
    links = Links(np.array(mbit) * 125_000.0)
    aggregation = Aggregation(4, 4_000_000, num_chunks=chunks)
    random = np.random.default_rng(0)
    luck = np.exp(random.normal(0, jitter, (steps, 4)))
    workload = Workload(FIXED_S, np.tile(1 / SPEEDS, (steps, 1)), luck)
    return run_over_links(
        policy,
        CLUSTER,
        workload,
        [links] * steps,
        SharePlanner(OptimalShares(), aggregation, links),
        joint=JointSizes(aggregation) if joint else None,
        noise=noise,
    )


def test_the_simulator_ends_where_the_joint_plan_is():
    """The same sizes and the same seconds as ``plan_jointly`` with the shares in force."""
    separate, both = (ran([150, 150, 150, 50], 8, joint=joint) for joint in (False, True))
    shares = both.plans[-1].shares
    plan = plan_jointly(
        AffineTime(FIXED_S, 1 / SPEEDS),
        CLUSTER,
        Aggregation(4, 4_000_000, num_chunks=8),
        Links(np.array([150, 150, 150, 50]) * 125_000.0),
        shares=shares,
    )
    (event,) = [each for each in both.events if isinstance(each, JointlyPlanned)]

    assert plan.gains
    assert abs(both.batch_size[-1] - plan.batch_size).max() <= 1  # a policy's own rounding
    assert both.step_s[-1] == pytest.approx(plan.step_s, rel=0.01)
    assert event.step_s == pytest.approx(plan.step_s, rel=0.02)
    assert both.step_s[-20:].mean() < 0.99 * separate.step_s[-20:].mean()


def test_where_nothing_is_gained_both_runs_are_the_same():
    """Step by step, also with noise."""
    settings = {"noise": 0.1, "jitter": 0.05, "policy": "auto"}
    one, other = (ran([100] * 4, 16, joint=joint, **settings) for joint in (False, True))

    assert one.step_s.tolist() == other.step_s.tolist()
    assert one.batch_size.tolist() == other.batch_size.tolist()
    assert one.events == other.events


def test_the_same_arguments_give_the_same_run():
    """Noise and all."""
    settings = {"joint": True, "noise": 0.1, "jitter": 0.05, "policy": "auto"}
    one, other = (ran([200, 150, 100, 50], 8, **settings) for _ in range(2))

    assert one.step_s.tolist() == other.step_s.tolist()
    assert one.events == other.events


def test_what_does_not_fit_is_refused():
    """Other workers, and more links than steps."""
    links = Links(np.full(4, 1e6))
    shares = SharePlanner(OptimalShares(), Aggregation(4, 1_000_000), links)
    workload = Workload(FIXED_S, np.tile(1 / SPEEDS, (3, 1)))
    with pytest.raises(ValueError, match=r"run_over_links\(cluster="):
        run_over_links("auto", Cluster(3, 9), workload, [links], shares)
    with pytest.raises(ValueError, match=r"run_over_links\(links="):
        run_over_links("auto", CLUSTER, workload, [links] * 4, shares)
