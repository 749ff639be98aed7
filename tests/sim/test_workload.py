"""Times that are no line: flat at first, or any curve."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from evenstep import AffineTime, Cluster, allocate, sim
from evenstep.sim._workload import SaturatedTime
from evenstep.timemodels import TableTime, bisect_batch

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
