"""Workers that leave and join: what a run over them does is what an elastic restart would."""

import numpy as np
import pytest

from benchmarks._local_sgd import LocalSgd
from benchmarks._stealing import Stealing
from evenstep import Cluster, sim
from evenstep._planner import Bounds, Job, Planner, Report
from evenstep.claims import Bsp, Hybrid
from evenstep.policies import Auto

LEAVES = np.array([[1, 1, 1]] * 12 + [[1, 0, 1]] * 6 + [[1, 1, 1]] * 12, bool)


def workload(presence=LEAVES, seed=0):
    """Three unlike workers, of which the middle one is away from step 12 to 17."""
    rng = np.random.default_rng(seed)
    slope_s = np.tile([0.001, 0.003, 0.002], (len(presence), 1))
    jitter = np.exp(0.02 * rng.standard_normal(slope_s.shape))
    return sim.Workload(np.array([0.01, 0.004, 0.002]), slope_s, jitter, presence=presence)


@pytest.mark.parametrize("policy", ["auto", "equal", "dynamic-batching", "lb-bsp-2020", "lbb"])
@pytest.mark.parametrize("scheme", [Bsp(), Stealing(), Hybrid()], ids=repr)
def test_every_step_is_whole(policy, scheme):
    """The same global batch whoever is there, and nothing for who is not."""
    report = sim.run(policy, Cluster(3, 60), workload(), scheme=scheme)

    assert (report.batch_size.sum(axis=1) == 60).all()
    assert not report.batch_size[~LEAVES].any()
    assert not report.compute_s[~LEAVES].any()
    assert report.restarts == (12, 18)
    assert np.array_equal(report.presence, LEAVES)


def test_it_is_a_restart_of_the_planner():
    """Step by step what the trainer's planner does when it is made anew with what was learnt."""
    given = workload()
    report = sim.run("auto", Cluster(3, 60), given)

    planner, before = None, np.empty(0, int)
    for step in range(given.num_steps):
        here = given.members(step)
        if planner is None or len(here) != len(before):
            bounds = Bounds(min=(1,) * len(here), max=(60,) * len(here))
            fresh = Planner(Auto(), Job(len(here), 60, bounds=bounds), warm_up_steps=0)
            if planner is not None:
                former = [list(before).index(worker) if worker in before else -1 for worker in here]
                fresh.restore(planner.learnt(), np.array(former))
            planner, before = fresh, here
        plan = planner.plan
        assert report.batch_size[step, here].tolist() == list(plan.batch_size)
        reports = [
            Report(step, size, 60, seconds, 0.0)
            for size, seconds in zip(plan.batch_size, report.compute_s[step, here], strict=True)
        ]
        planner.observe(reports, next_step=step + 1)
        planner.account(reports, plan)


def test_those_who_stay_keep_what_is_known_of_them():
    """After a leave the plan is uneven at once; with a stranger among them it begins equal."""
    report = sim.run("auto", Cluster(3, 60), workload())

    best_s = sim.oracle(Cluster(3, 60), workload())
    assert report.step_s[12] == pytest.approx(best_s[12], rel=0.1)
    assert report.batch_size[18].tolist() == [20, 20, 20]


def test_the_absent_are_not_idle():
    """Time is paid for those who are there."""
    presence = np.array([[True, False]] * 3)
    given = sim.Workload(np.zeros(2), np.full((3, 2), 0.1), presence=presence)
    report = sim.run("equal", Cluster(2, 10), given)

    assert report.idle_share == pytest.approx(0.0)
    assert report.step_s.tolist() == [1.0] * 3


def test_the_oracle_plans_for_who_is_there():
    """And nobody beats it without jitter."""
    given = workload()
    calm = sim.Workload(given.intercept_s, given.slope_s, presence=LEAVES)

    best_s = sim.oracle(Cluster(3, 60), calm)
    assert (sim.run("auto", Cluster(3, 60), calm).step_s >= best_s).all()
    assert len(set(best_s[:12])) == len(set(best_s[12:18])) == 1
    assert best_s[12] > best_s[0] == best_s[18]


def test_a_change_of_members_ends_a_round():
    """Nobody averages with those who are gone."""
    report = sim.run("equal", Cluster(3, 60), workload(), scheme=LocalSgd(5))

    assert report.staleness[:18].tolist() == [0, 1, 2, 3, 4] * 2 + [0, 1] + [0, 1, 2, 3, 4, 0]
    assert (report.batch_size.sum(axis=1) == 60).all()


def test_too_few_to_hold_the_batch_are_refused():
    """With the step in which that happens."""
    with pytest.raises(ValueError, match="2 workers of step 12"):
        sim.run("auto", Cluster(3, 60, max_batch_size=25), workload())
