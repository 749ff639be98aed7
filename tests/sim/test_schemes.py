"""What schemes make of simulated steps, and of workers that leave and join."""

from itertools import product

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from benchmarks._local_sgd import LocalSgd
from benchmarks._stealing import Stealing
from evenstep import Cluster, sim
from evenstep._planner import Bounds, Job, Planner, Report
from evenstep.claims import Bsp, Factoring, Hybrid
from evenstep.policies import Auto, Fixed
from evenstep.sim._run import as_planned, filled, in_turns

from .._tiers import slow_but

IN_STEP = [Stealing(), Stealing(hand_over_s=0.001), Hybrid(), Hybrid(claim_s=0.001)]
in_step = pytest.mark.parametrize("scheme", IN_STEP, ids=repr)
EIGHT = Cluster(8, 512)


def run(name, scheme, policy="dynamic-batching", num_steps=120, seed=0):
    """A run, and what the plan that knows takes under plain steps."""
    given = sim.scenario(name, 8, num_steps, seed)
    best_s = sim.oracle(EIGHT, given.workload)
    return sim.run(policy, EIGHT, given.workload, scheme=scheme), best_s


@pytest.mark.parametrize("scheme", [Bsp(), LocalSgd(1)], ids=repr)
@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_the_machine_of_plain_steps_is_the_fast_path(scheme, sizes, seed):
    """Taking turns one by one gives what whole arrays give."""
    sizes = np.array([*sizes, 1])
    rng = np.random.default_rng(seed)
    workload = sim.Workload(rng.uniform(0, 1, len(sizes)), rng.uniform(0.1, 1, (1, len(sizes))))

    def chunk_s(rank, num_samples, again):
        return workload.chunk_s(0, rank, num_samples, again=again)

    slow = in_turns(scheme, sizes, np.ones(len(sizes)), chunk_s)
    plan, cluster = Fixed(tuple(sizes.tolist())), Cluster(len(sizes), int(sizes.sum()), 0)
    report = sim.run(plan, cluster, workload, scheme=scheme)
    assert slow.batch_size.tolist() == report.batch_size.tolist()
    assert slow.compute_s.tolist() == report.compute_s.tolist()
    assert slow.end_s.max() == report.step_s[0]


@in_step
@pytest.mark.parametrize("name", ["burst", "mixed", "capped", "spot", "saturated"])
def test_the_samples_of_a_step_stay_the_same(scheme, name):
    """However they move, each step computes the global batch, and nothing is stale."""
    given = sim.scenario(name, 5, 30, seed=2)
    report = sim.run("auto", given.cluster(200), given.workload, scheme=scheme)

    assert (report.batch_size.sum(axis=1) == 200).all()
    assert not report.staleness.any()
    assert (report.compute_s.max(axis=1) <= report.step_s).all()
    assert 0 <= report.idle_share < 1
    assert report.samples_per_s == pytest.approx(200 * 30 / report.step_s.sum())


@pytest.mark.parametrize(
    ("name", "scheme"),
    slow_but(
        [("burst", IN_STEP[1]), ("jitter", IN_STEP[3])], product(["burst", "jitter"], IN_STEP)
    ),
    ids=str,
)
def test_moving_samples_absorbs_what_no_plan_foresees(name, scheme):
    """Where speeds change at once, a step ends earlier than the plan alone would have it."""
    moved, best_s = run(name, scheme)
    plain, _ = run(name, Bsp())

    assert moved.regret(best_s) < plain.regret(best_s) - 0.02
    assert moved.idle_share < plain.idle_share
    assert moved.num_moves.sum() > 0 == plain.num_moves.sum()


def test_stealing_leaves_calm_workers_alone():
    """Once the plan is good nobody lags; claims are made whether needed or not."""
    steal, best_s = run("static", Stealing(hand_over_s=0.001))
    claim, _ = run("static", Hybrid(claim_s=0.001))

    assert steal.num_moves[10:].mean() < 1
    assert claim.num_moves.mean() > 10
    assert claim.regret(best_s) > steal.regret(best_s) + 0.005


def test_claims_cost_what_they_cost():
    """Dearer ones lengthen the step and are no part of computing."""
    cheap, _ = run("static", Hybrid())
    dear, _ = run("static", Hybrid(claim_s=0.005))

    assert dear.step_s.mean() > 1.1 * cheap.step_s.mean()
    assert dear.idle_share > cheap.idle_share + 0.1
    assert dear.compute_s.sum() == pytest.approx(cheap.compute_s.sum(), rel=0.02)


def test_a_rank_that_turns_slow_gives_its_rest_away():
    """Four times slower from one step to the next: the step takes little longer than the best."""
    slope_s = np.full((12, 4), 0.001)
    slope_s[10:, 2] = 0.004
    times = {"intercept_s": np.zeros(4), "slope_s": slope_s}
    ideal_s = 400 / (3 * 1000 + 250)
    plan = Fixed((100,) * 4)

    plain = sim.run(plan, Cluster(4, 400), sim.Workload(**times))
    assert plain.step_s[10] == pytest.approx(0.4)
    for scheme, bar in ((Stealing(), 1.5), (Hybrid(), 1.7), (Hybrid(first=0.1), 1.1)):
        step_s = sim.run(plan, Cluster(4, 400), sim.Workload(**times), scheme=scheme).step_s
        assert step_s[10] < bar * ideal_s
        assert step_s[9] < 1.03 * 0.1


def test_a_hopelessly_slow_rank_cannot_hold_up_the_step():
    """Its single sample takes a second: it claims none, where an eighth of the rest is not one."""
    slope_s = np.array([[0.001, 0.001, 1.0]] * 3)
    report = sim.run(
        Fixed((50, 50, 0)),
        Cluster(3, 100, min_batch_size=0),
        sim.Workload(np.zeros(3), slope_s),
        scheme=Hybrid(factoring=Factoring(0.8)),
    )

    assert report.batch_size[1:, 2].tolist() == [0, 0]
    assert (report.step_s[1:] < 0.06).all()


def test_local_steps_average_out_what_comes_singly():
    """Four steps between two barriers lose less to single slow ones, and to communication."""
    given, comm = sim.scenario("jitter", 8, 480), lambda end_s: end_s.max() + 0.02
    speeds = [
        sim.run("auto", EIGHT, given.workload, scheme=LocalSgd(num_steps), comm=comm)
        for num_steps in (1, 4, 16)
    ]

    assert speeds[0].samples_per_s * 1.1 < speeds[1].samples_per_s < speeds[2].samples_per_s
    assert [report.staleness.max() for report in speeds] == [0, 3, 15]


def test_one_local_step_is_a_plain_step():
    """To the last bit."""
    plain, _ = run("burst", Bsp())
    local, _ = run("burst", LocalSgd(1))

    assert np.array_equal(plain.step_s, local.step_s)
    assert np.array_equal(plain.batch_size, local.batch_size)


def test_rounds_are_spread_over_their_steps():
    """Constant times, two workers, one twice as fast: what a round of four steps adds up to."""
    times = {"intercept_s": np.zeros(2), "slope_s": np.array([[0.1, 0.2]] * 10)}
    cluster = Cluster(2, 20)

    equal = sim.run(
        "equal",
        cluster,
        sim.Workload(**times),
        scheme=LocalSgd(4),
        comm=lambda end_s: end_s.max() + 1,
    )
    np.testing.assert_allclose(equal.step_s, [2.25] * 8 + [2.5] * 2)
    assert equal.batch_size.tolist() == [[10, 10]] * 10
    by_speed = sim.run("equal", cluster, sim.Workload(**times), scheme=LocalSgd(4, by_speed=True))
    # Speeds are known after the first round: from then on twice the steps for the fast one.
    assert by_speed.batch_size.tolist() == [[10, 10]] * 4 + [[20, 10]] * 6
    np.testing.assert_allclose(by_speed.step_s, 2.0)
    assert by_speed.staleness.tolist() == [0, 1, 2, 3, 1, 3, 5, 7, 1, 3]
    assert by_speed.idle_share == pytest.approx(1 - (4 * 3 + 6 * 4) / 40)


def test_local_steps_go_by_the_times_of_their_moment():
    """Five of them over four steps: number h goes by step 4 h // 5."""
    single_s = np.array([[1.0], [10.0], [100.0], [1000.0]])
    done = as_planned(single_s, np.array([7]), np.array([5]))

    assert done.compute_s[:, 0].tolist() == [2.0, 10.0, 100.0, 1000.0]
    assert done.batch_size[:, 0].tolist() == [14, 7, 7, 7]
    assert done.staleness.tolist() == [1, 2, 3, 4]
    assert (done.shown_s[0], done.shown_size[0]) == (1112.0 / 5, 7)


@pytest.mark.parametrize("scheme", [*IN_STEP, LocalSgd(3), LocalSgd(3, by_speed=True)], ids=repr)
def test_the_same_arguments_give_the_same_report(scheme):
    """By seed and nothing else."""
    one, other = (run("burst", scheme, num_steps=40)[0] for _ in range(2))

    for name in ("step_s", "batch_size", "compute_s", "staleness", "num_moves"):
        assert np.array_equal(getattr(one, name), getattr(other, name))
    assert one.reasons == other.reasons


def test_run_and_oracle_take_a_scheme():
    """The same argument for both, and by default a plain step."""
    workload = sim.scenario("burst", 8, 20).workload
    plain = sim.oracle(EIGHT, workload)

    assert np.array_equal(plain, sim.oracle(EIGHT, workload, scheme=Bsp()))
    assert not np.array_equal(plain, sim.oracle(EIGHT, workload, scheme=Hybrid()))


def test_unknown_speeds_are_taken_for_the_mean():
    """So that the first to be measured does not look like the only fast one."""
    assert filled(np.array([np.nan, np.nan])).tolist() == [1.0, 1.0]
    assert filled(np.array([np.nan, 2.0, 4.0])).tolist() == [3.0, 2.0, 4.0]

    slope_s = np.array([[0.00100, 0.00101, 0.00102, 0.00103]])
    first = sim.run("equal", Cluster(4, 100), sim.Workload(np.zeros(4), slope_s), scheme=Hybrid())
    assert first.batch_size.max() <= 27


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
