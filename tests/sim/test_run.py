"""The simulator runs the trainer's own planner, and the oracle is what nobody beats."""

import numpy as np
import pytest

from evenstep import Cluster, StepTimings, sim
from evenstep.policies import Auto, by_name

CLUSTER = Cluster(4, 128)


def workers(seed=0, num_steps=60, *, jitter=0.02):
    """Return times of four unlike workers, one of which turns slower in the middle."""
    rng = np.random.default_rng(seed)
    slope_s = np.tile(1e-3 * 4 ** rng.uniform(0, 1, 4), (num_steps, 1))
    slope_s[num_steps // 2 :, 1] *= 2
    return {
        "intercept_s": rng.uniform(0.002, 0.02, 4),
        "slope_s": slope_s,
        "jitter": np.exp(jitter * rng.standard_normal((num_steps, 4))),
    }


@pytest.mark.parametrize("name", ["auto", "equal", "dynamic-batching", "lb-bsp-2020", "lbb"])
def test_it_is_the_plain_loop(name):
    """A policy that is asked by hand, step after step, gives the same sizes and times."""
    times, policy = workers(), by_name(name)
    report = sim.run(name, CLUSTER, sim.Workload(**times))

    decision = policy.init(CLUSTER)
    for step, (slope_s, luck) in enumerate(zip(times["slope_s"], times["jitter"], strict=True)):
        sizes = decision.batch_size
        compute_s = (times["intercept_s"] + slope_s * sizes) * luck
        assert report.batch_size[step].tolist() == sizes.tolist()
        assert report.step_s[step] == compute_s.max()
        timings = StepTimings(sizes, compute_s, np.zeros(4))
        decision = policy.update(CLUSTER, timings, decision.state)


@pytest.mark.parametrize("seed", range(5))
def test_nobody_beats_the_oracle(seed):
    """Without jitter, the plan that knows every step's times is at least as good in each."""
    times = workers(seed, jitter=0.0)

    best_s = sim.oracle(CLUSTER, sim.Workload(**times))

    assert (sim.run("auto", CLUSTER, sim.Workload(**times)).step_s >= best_s).all()
    assert sim.run("auto", CLUSTER, sim.Workload(**times)).regret(best_s) < 0.1
    assert sim.run("equal", CLUSTER, sim.Workload(**times)).regret(best_s) > 0.2


def test_the_oracle_does_not_know_the_jitter():
    """It plans for the times without luck, and then has the same luck as everybody."""
    times = workers(jitter=0.5)
    calm = dict(times, jitter=None)

    assert (
        sim.oracle(CLUSTER, sim.Workload(**times)) != sim.oracle(CLUSTER, sim.Workload(**calm))
    ).any()
    planned = sim.oracle(CLUSTER, sim.Workload(**calm))
    assert len(set(planned.tolist())) == 2  # one plan for each half, each step the same


def test_idle_share_and_speed():
    """Two workers, one twice as fast, at equal batches: a quarter of all time is idle."""
    report = sim.run("equal", Cluster(2, 20), sim.Workload(np.zeros(2), np.array([[0.1, 0.2]] * 3)))

    assert report.idle_share == pytest.approx(0.25)
    assert report.samples_per_s == pytest.approx(10.0)


def test_communication_adds_to_the_step():
    """A step takes what is said of it, by when each worker ends; by itself, the slowest's time."""
    workload = sim.Workload(**workers(jitter=0.0))
    alone = sim.run("equal", CLUSTER, workload)
    later = sim.run("equal", CLUSTER, workload, comm=lambda end_s: end_s.max() + 0.05)

    assert np.array_equal(alone.step_s, alone.compute_s.max(axis=1))
    np.testing.assert_allclose(later.step_s, alone.step_s + 0.05)


def test_bounds_and_granularity_hold():
    """What the cluster allows is what is planned."""
    cluster = Cluster(4, 128, min_batch_size=8, max_batch_size=48, granularity=8)

    sizes = sim.run(Auto(), cluster, sim.Workload(**workers())).batch_size

    assert (sizes.sum(axis=1) == 128).all()
    assert sizes.min() >= 8
    assert sizes.max() <= 48
    assert (sizes % 8 == 0).all()


@pytest.mark.parametrize("policy", ["equal", "auto"])
def test_a_cap_of_nothing_gives_nothing(policy):
    """Where no sample fits, none is computed; the oracle gives none either."""
    cluster, workload = Cluster(2, 10, 0, [0, 10]), sim.Workload(np.zeros(2), np.ones((4, 2)))

    report = sim.run(policy, cluster, workload)

    assert report.batch_size.tolist() == [[0, 10]] * 4
    assert report.step_s.tolist() == sim.oracle(cluster, workload).tolist()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"intercept_s": np.zeros((2, 2))}, "must have shape"),
        ({"intercept_s": np.array([0.0, -1.0, 0.0, 0.0])}, "worker 1"),
        ({"slope_s": np.ones(4)}, "slope_s"),
        ({"slope_s": np.ones((5, 3))}, "slope_s"),
        ({"slope_s": np.full((60, 4), np.nan)}, "worker 0 in step 0"),
        ({"jitter": np.ones((3, 4))}, "jitter"),
        ({"jitter": np.zeros((60, 4))}, "jitter"),
    ],
)
def test_times_that_cannot_be_are_refused(change, match):
    """The error names the argument and the place."""
    with pytest.raises(ValueError, match=match):
        sim.run("auto", CLUSTER, sim.Workload(**(workers() | change)))


def test_another_number_of_workers_is_refused():
    """A cluster of three and times of four."""
    with pytest.raises(ValueError, match="4 workers"):
        sim.run("auto", Cluster(3, 30), sim.Workload(**workers()))


def test_a_policy_that_breaks_its_contract_is_named():
    """In training the last good plan would stay; in a simulation it is the question."""

    class Broken(Auto):
        def update(self, cluster, timings, state):
            decision = Auto.update(self, cluster, timings, state)
            object.__setattr__(decision, "batch_size", decision.batch_size + 1)
            return decision

    with pytest.raises(ValueError, match=r"step 0.*add up"):
        sim.run(Broken(), CLUSTER, sim.Workload(**workers()))
