"""Planning samples and shares together never loses by its model, and is near the best there is."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from evenstep import AffineTime, Cluster
from evenstep.control import joint_bound_s, plan_jointly, timeline_s
from evenstep.sharding import Aggregation, Links, exchange_s, optimal_shares

V = 1_000_000


def case(bandwidths, slope_s, *, chunks=None, intercept_s=0.0):
    """Times, an aggregation and links; bandwidths in aggregations per second."""
    size = len(bandwidths)
    times = AffineTime(np.full(size, intercept_s), np.array(slope_s, np.float64))
    return times, Aggregation(size, V, num_chunks=chunks), Links(np.array(bandwidths) * float(V))


@pytest.mark.parametrize(
    ("slope_s", "bandwidths", "bound_s", "separate_s"),
    [
        ([0.01] * 4, [10] * 4, 0.31, 0.31),
        ([0.01] * 4, [10, 10, 10, 5], 0.335, 0.36),
        ([0.01] * 4, [10, 10, 10, 2], 0.5, 0.66),
        ([0.01, 0.01, 0.01, 0.02], [10] * 4, 0.3114, 0.3329),
        ([0.01, 0.01, 0.01, 0.02], [10, 10, 10, 5], 0.3543, 0.3829),
    ],
)
def test_the_bound_of_each_rank_alone(slope_s, bandwidths, bound_s, separate_s):
    """Known figures; the plan is between it and the separate plans, in whole samples and chunks."""
    times, aggregation, links = case(bandwidths, slope_s)
    plan = plan_jointly(times, Cluster(4, 64), aggregation, links)

    assert joint_bound_s(times, Cluster(4, 64, 0), aggregation, links) == pytest.approx(
        bound_s, abs=6e-5
    )
    assert bound_s * 0.999 <= plan.step_s <= plan.separate_s
    assert plan.separate_s == pytest.approx(separate_s, rel=0.03)


def test_nothing_is_gained_where_the_slow_link_sets_the_time():
    """A common start, the others ending together: equal batches, and no samples are worse still."""
    times, aggregation, links = case([10, 10, 10, 2], [0.01] * 4)
    plan = plan_jointly(times, Cluster(4, 64), aggregation, links)
    shares = np.array([1, 1, 1, 0]) / 3

    assert not plan.gains
    assert plan.batch_size.tolist() == [16] * 4
    with_all, without = (
        timeline_s(0.01 * np.array(sizes), aggregation, links, shares=shares)
        for sizes in ([16, 16, 16, 16], [64 / 3, 64 / 3, 64 / 3, 0])
    )
    # A fluid simulation gives .660 and .713.
    assert with_all == pytest.approx(0.660, rel=0.015)
    assert without == pytest.approx(0.713, rel=0.015)


def drawn(seed, *, chunks):
    random = np.random.default_rng(seed)
    size = int(random.integers(2, 6))
    slope_s = np.exp(random.uniform(np.log(0.005), np.log(0.05), size))
    return case(random.uniform(2, 16, size), slope_s, chunks=chunks, intercept_s=0.01)


@given(
    seed=st.integers(0, 2**31),
    chunks=st.sampled_from([1, 4, 8, None]),
    overlap=st.sampled_from([0.0, 2 / 3, 1.0]),
)
def test_never_slower_than_the_separate_plans(seed, chunks, overlap):
    """By the model; samples add up within the bounds, and shares to 1."""
    times, aggregation, links = drawn(seed, chunks=chunks)
    cluster = Cluster(times.world_size, 48, 2, 40)
    plan = plan_jointly(times, cluster, aggregation, links, overlap=overlap)
    again = timeline_s(
        times.seconds(plan.batch_size), aggregation, links, shares=plan.shares, overlap=overlap
    )

    assert plan.step_s == again <= plan.separate_s
    assert plan.batch_size.sum() == 48
    assert plan.batch_size.min() >= 2
    assert plan.batch_size.max() <= 40
    assert plan.shares.sum() == pytest.approx(1)
    assert plan.shares.min() >= 0
    if overlap == 0:
        assert joint_bound_s(times, cluster, aggregation, links) <= plan.step_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_near_the_best_of_all(seed):
    """Every split of 9 samples with every share in sixths: within 6 %."""
    random = np.random.default_rng(seed)
    times, aggregation, links = case(
        random.uniform(2, 16, 3), np.exp(random.uniform(-4.6, -2.8, 3)), chunks=4
    )
    grid = [np.array([i, j, 6 - i - j]) / 6 for i in range(7) for j in range(7 - i)]
    plan = plan_jointly(times, Cluster(3, 9), aggregation, links, margin=0)
    best_s = plan.step_s
    for one, two in itertools.product(range(1, 8), repeat=2):
        if one + two < 9:
            compute_s = times.seconds(np.array([one, two, 9 - one - two]))
            if compute_s.max() < best_s:
                each = (timeline_s(compute_s, aggregation, links, shares=w) for w in grid)
                best_s = min(best_s, *each)

    assert plan.step_s <= 1.06 * best_s


def test_a_worker_that_is_done_early_pushes_early():
    """Where the links together set the time, unlike loads are a few per cent faster."""
    times, aggregation, links = case([6, 20, 16], [0.011, 0.019, 0.011], chunks=8)
    plan = plan_jointly(times, Cluster(3, 24), aggregation, links)

    assert plan.gains
    assert plan.step_s < 0.97 * plan.separate_s


@given(seed=st.integers(0, 2**31))
def test_the_bound_is_the_linear_programs(seed):
    """Samples that can be divided, with bounds, at any bandwidths."""
    times, aggregation, links = drawn(seed, chunks=None)
    size = times.world_size
    cluster = Cluster(size, 48, 2, 40)
    own_s = V / links.bandwidth_bytes_per_s
    rows = np.hstack([np.diag(times.slope_s), np.diag((size - 2) * own_s), -np.ones((size, 1))])
    sums = [[1.0] * size + [0.0] * (size + 1), [0.0] * size + [1.0] * size + [0.0]]
    answer = linprog(
        [0.0] * 2 * size + [1.0],
        A_ub=rows,
        b_ub=-times.intercept_s - own_s,
        A_eq=sums,
        b_eq=[48, 1],
        bounds=[(2, 40)] * size + [(0, 1)] * size + [(0, None)],
    )

    assert joint_bound_s(times, cluster, aggregation, links) == pytest.approx(answer.fun, rel=1e-6)


@given(seed=st.integers(0, 2**31), chunks=st.sampled_from([1, 2, 8, None]))
def test_the_timeline_is_between_the_closed_forms(seed, chunks):
    """All done at once: no more than in lock-step, no less than every link is busy."""
    _, aggregation, links = drawn(seed, chunks=chunks)
    size = aggregation.world_size
    shares = np.random.default_rng(seed).dirichlet(np.ones(size))
    endless = Aggregation(size, V, num_chunks=None)
    taken_s = timeline_s(np.zeros(size), aggregation, links, shares=shares)

    assert taken_s >= exchange_s(endless, links, shares=shares) * (1 - 1e-9)
    if chunks is not None:
        assert taken_s <= exchange_s(aggregation, links, shares=shares) * (1 + 1e-9)


def test_later_gradients_never_end_a_step_earlier():
    """And overlap never ends it later."""
    _, aggregation, links = case([14, 6, 5, 9], [0.02] * 4, chunks=8)
    shares = optimal_shares(aggregation, links)
    random = np.random.default_rng(0)
    for _ in range(50):
        compute_s = random.uniform(0, 0.5, 4)
        later_s = compute_s + random.uniform(0, 0.2, 4)
        one, other = (
            timeline_s(each, aggregation, links, shares=shares) for each in (compute_s, later_s)
        )
        hidden = timeline_s(compute_s, aggregation, links, shares=shares, overlap=0.7)
        assert hidden <= one <= other


def test_settings_out_of_range_are_refused():
    """By name."""
    times, aggregation, links = case([1, 1, 1], [1, 1, 1])
    cluster = Cluster(3, 9)
    with pytest.raises(ValueError, match=r"plan_jointly\(margin="):
        plan_jointly(times, cluster, aggregation, links, margin=-1)
    with pytest.raises(ValueError, match=r"timeline_s\(overlap="):
        plan_jointly(times, cluster, aggregation, links, overlap=2)
    with pytest.raises(ValueError, match="the same ranks"):
        plan_jointly(times, Cluster(2, 9), aggregation, links)
    servers = Aggregation(3, V, is_worker=np.array([True, True, False]))
    with pytest.raises(ValueError, match="workers that all serve"):
        joint_bound_s(times, cluster, servers, links)
