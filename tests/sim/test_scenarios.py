"""Scenarios are the same for the same arguments, and workloads may be any curve."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from evenstep import AffineTime, Cluster, allocate, sim
from evenstep.sim._scenarios import scenario_names
from evenstep.sim._workload import SaturatedTime
from evenstep.timemodels import bisect_batch
from tests.sim import reference_scenarios

from ..tables import TableTime

EIGHT = scenario_names()[:8]

# Sums of intercept_s, slope_s and jitter at seed 0 with the defaults, as first published.
PUBLISHED = {
    "static": (0.08968462699246735, 10.591909731858411, 4800.669336215533),
    "step": (0.08968462699246735, 11.988289266517848, 4800.669336215533),
    "drift": (0.08968462699246735, 11.761817779290784, 4800.669336215533),
    "burst": (0.08968462699246735, 12.906660108413433, 4800.669336215533),
    "jitter": (0.08968462699246735, 10.591909731858411, 4943.401886021711),
    "diurnal": (0.08968462699246735, 10.59190973185841, 4800.669336215533),
    "correlated": (0.08968462699246735, 12.842275200000707, 4800.669336215533),
    "square": (0.08968462699246735, 10.684152886540959, 4800.669336215533),
}


def arrays(given):
    return given.intercept_s, given.slope_s, given.jitter


@pytest.mark.parametrize("name", EIGHT)
@pytest.mark.parametrize(
    ("world_size", "num_steps", "seed"), [(8, 600, 0), (8, 600, 19), (3, 40, 7), (1, 1, 1000)]
)
def test_the_eight_are_those_of_the_reference(name, world_size, num_steps, seed):
    """To the last bit: what is reported on one is reported on the other."""
    expected = reference_scenarios.scenario(name, world_size, num_steps, seed)

    for ours, theirs in zip(
        arrays(sim.scenario(name, world_size, num_steps, seed)), expected, strict=True
    ):
        assert ours.dtype == theirs.dtype
        assert np.array_equal(ours, theirs)


def test_the_eight_have_the_names_of_the_reference():
    """In their order, too."""
    assert EIGHT == reference_scenarios.NAMES


@pytest.mark.parametrize("name", EIGHT)
def test_the_numbers_are_those_published(name):
    """Another numpy may not draw other ones, or tables could not be compared."""
    given = sim.scenario(name)

    found = tuple(array.sum() for array in arrays(given))
    assert found == pytest.approx(PUBLISHED[name], rel=1e-12)


@pytest.mark.parametrize("name", scenario_names())
@pytest.mark.parametrize(("world_size", "num_steps"), [(1, 1), (2, 5), (7, 30)])
def test_every_scenario_can_be_run(name, world_size, num_steps):
    """At any size, and by seed."""
    given = sim.scenario(name, world_size, num_steps, seed=3)
    cluster = given.cluster(32 * world_size)

    report = sim.run("auto", cluster, given.workload)
    again = sim.run("auto", cluster, sim.scenario(name, world_size, num_steps, 3).workload)

    assert given.name == name
    assert (given.world_size, given.num_steps) == (world_size, num_steps)
    assert (report.batch_size.sum(axis=1) == 32 * world_size).all()
    assert np.array_equal(report.step_s, again.step_s)
    assert np.array_equal(report.batch_size, again.batch_size)


@pytest.mark.parametrize("name", scenario_names())
def test_seeds_differ_and_values_stay(name):
    """Another seed is another draw; a scenario is not changed by whoever reads it."""
    assert not np.array_equal(sim.scenario(name).slope_s, sim.scenario(name, seed=1).slope_s)
    with pytest.raises(ValueError, match="read-only"):
        sim.scenario(name).slope_s[0] = 1.0


def test_spot_workers_leave_and_come_back():
    """Every second one; the others are there in every step."""
    presence = sim.scenario("spot", 6, 2000).presence

    assert presence[:, ::2].all()
    left = (presence[:-1] & ~presence[1:]).any(axis=0)
    came = (~presence[:-1] & presence[1:]).any(axis=0)
    assert left.tolist() == came.tolist() == [False, True] * 3


def test_saturated_devices_are_flat_at_first():
    """Any batch up to its saturation takes as long."""
    given = sim.scenario("saturated")
    one = given.workload.seconds(0, np.ones(8, np.int64))

    assert (given.saturation > 1).all()
    assert np.array_equal(one, given.workload.seconds(0, given.saturation))
    assert (given.workload.seconds(0, given.saturation + 1) > one).all()


@pytest.mark.parametrize("world_size", [1, 2, 5, 8, 100])
def test_caps_hold_96_samples_a_worker(world_size):
    """So that 64 a worker, as in the other scenarios, always fit, whoever has to take them."""
    given = sim.scenario("capped", world_size, num_steps=60)
    cluster = given.cluster(96 * world_size)

    assert cluster.max_batch_size.max() <= 192
    assert (sim.run("auto", cluster, given.workload).batch_size <= given.max_batch_size).all()
    with pytest.raises(ValueError, match="max_batch_size"):
        given.cluster(200 * world_size)


def test_mixed_workers_are_orders_apart():
    """The slowest GPU is twenty times as fast as the fastest CPU, and costs more to start."""
    given = sim.scenario("mixed")

    assert (given.slope_s[:, 1::2].min() / given.slope_s[:, ::2].max()) > 20
    assert given.intercept_s[::2].min() >= 0.005 >= given.intercept_s[1::2].max()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"name": "storm"}, "name"),
        ({"name": "burst", "world_size": 0}, "world_size"),
        ({"name": "burst", "world_size": 2.0}, "world_size"),
        ({"name": "spot", "num_steps": 0}, "num_steps"),
        ({"name": "burst", "seed": -1}, "seed"),
        ({"name": "burst", "seed": "0"}, "seed"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, match):
    """Each by its name."""
    with pytest.raises(ValueError, match=rf"scenario\({match}=...\)"):
        sim.scenario(**arguments)


def test_arrays_that_were_given_stay_their_owners():
    """A scenario has its own, which cannot be written to."""
    given = np.zeros(2), np.ones((3, 2)), np.ones((3, 2))
    scenario = sim.Scenario("mine", *given)

    assert all(array.flags.writeable for array in given)
    assert not any(array.flags.writeable for array in arrays(scenario))


LINE = AffineTime(np.array([0.01, 0.002]), np.array([0.001, 0.003]))


def curve(saturation):
    """The same times as a table, written out size by size."""
    sizes = np.arange(101)
    rows = [
        (a + c * np.maximum(sizes, full)) * (sizes > 0)
        for a, c, full in zip(LINE.intercept_s, LINE.slope_s, saturation, strict=True)
    ]
    return TableTime(np.array(rows))


@given(st.lists(st.integers(0, 60), min_size=2, max_size=2), st.floats(0, 0.5), st.integers(0, 90))
def test_flat_and_then_linear_is_inverted_exactly(saturation, budget_s, most):
    """The largest batch within a time is the one that bisection finds."""
    times, caps = SaturatedTime(LINE, np.array(saturation)), np.array([most, 90])

    found = times.largest_batch(budget_s, caps)
    assert found.tolist() == bisect_batch(times.seconds, budget_s, most=caps).tolist()


@given(st.lists(st.integers(0, 90), min_size=2, max_size=2))
def test_flat_and_then_linear_is_its_table(saturation):
    """Times and best split are those of the curve written out."""
    times, table = SaturatedTime(LINE, np.array(saturation)), curve(saturation)
    for size in (0, 1, 30, 60, 100):
        sizes = np.array([size, 100 - size])
        assert times.seconds(sizes).tolist() == table.seconds(sizes).tolist()
    cluster = Cluster(2, 100)

    best = allocate(times, cluster)
    assert times.seconds(best).max() == table.seconds(allocate(table, cluster)).max()


def saturated(num_steps=40, jitter=None):
    slope_s = np.tile(LINE.slope_s, (num_steps, 1))
    return sim.Workload(LINE.intercept_s, slope_s, jitter, saturation=np.array([70, 20]))


def test_a_workload_and_its_curves_run_alike():
    """The same steps and the same oracle, by formula and by table."""
    jitter = np.exp(0.05 * np.random.default_rng(0).standard_normal((40, 2)))
    curves = sim.CurveWorkload([curve([70, 20])] * 40, jitter)
    cluster = Cluster(2, 100)

    one, other = (sim.run("auto", cluster, each) for each in (saturated(jitter=jitter), curves))
    assert np.array_equal(one.step_s, other.step_s)
    assert np.array_equal(one.batch_size, other.batch_size)
    best_s = sim.oracle(cluster, saturated(jitter=jitter))
    assert np.array_equal(best_s, sim.oracle(cluster, curves))


def test_nobody_beats_the_oracle_on_curves():
    """Without jitter it is the best in every step, flat parts and all."""
    best_s = sim.oracle(Cluster(2, 100), saturated())

    for policy in ("auto", "equal", "lbb"):
        assert (sim.run(policy, Cluster(2, 100), saturated()).step_s >= best_s).all()


def test_parts_of_a_step_pay_the_fixed_cost_once():
    """But each forward fills the device; a curve does not say what of it is fixed."""
    given = saturated()
    whole_s = given.seconds(0, np.array([90, 40]))
    for worker, size in enumerate((90, 40)):
        first_s = given.chunk_s(0, worker, size // 2, again=False)
        more_s = given.chunk_s(0, worker, size - size // 2, again=True)
        assert given.chunk_s(0, worker, size, again=False) == whole_s[worker]
        expected = whole_s[1] if worker else 0.01 + 2 * 0.07  # twice the flat part
        assert first_s + more_s == pytest.approx(expected)
    curves = sim.CurveWorkload([curve([0, 0])])
    assert curves.chunk_s(0, 1, 10, again=True) == curves.chunk_s(0, 1, 10, again=False) == 0.032


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"saturation": np.array([1])}, "saturation"),
        ({"saturation": np.array([1, -1])}, "saturation"),
        ({"saturation": np.array([1.5, 2.0])}, "saturation"),
        ({"presence": np.ones((3, 2))}, "presence"),
        ({"presence": np.ones((2, 2), bool)}, "presence"),
        ({"presence": np.array([[True, True], [False, False], [True, True]])}, "step 1"),
    ],
)
def test_workloads_that_cannot_be_are_refused(change, match):
    """The error names the argument, and the step where it is about one."""
    with pytest.raises(ValueError, match=match):
        sim.Workload(np.zeros(2), np.ones((3, 2)), **change)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: sim.CurveWorkload([]), "times"),
        (lambda: sim.CurveWorkload([LINE, AffineTime(np.zeros(3), np.ones(3))]), "times"),
        (lambda: sim.CurveWorkload([LINE], np.ones((2, 2))), "jitter"),
        (lambda: sim.CurveWorkload([LINE], np.zeros((1, 2))), "jitter"),
        (lambda: sim.run("auto", Cluster(3, 60), saturated()), "2 workers"),
        (lambda: sim.oracle(Cluster(3, 60), saturated()), "2 workers"),
    ],
)
def test_curves_that_cannot_be_are_refused(make, match):
    """Each argument by its name."""
    with pytest.raises(ValueError, match=match):
        make()
