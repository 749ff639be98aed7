"""Simulated exchanges move the bytes that were planned, and take what the model says."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import AffineTime, Cluster, allocate
from evenstep.network import (
    Aggregation,
    EqualShares,
    Links,
    OptimalShares,
    SharePlanner,
    exchange_s,
    optimal_shares,
)
from evenstep.network._plans._duration import ring_s
from evenstep.network.sim import follow_links, run_over_links, step_over_links_s
from evenstep.network.sim._shared_links import play_exchange
from evenstep.sim import Workload, run

LINKS = Links(np.array([200.0, 200, 200, 50]) * 125_000)
AGGREGATION = Aggregation(4, 8_000_000, num_chunks=16)


def test_bytes_are_those_of_the_shares():
    """A rank carries 1 + (N - 2) w of all bytes either way, whatever the links."""
    shares = np.array([0.5, 0.3, 0.2, 0.0])
    moved = play_exchange(AGGREGATION, LINKS, shares).transfers.num_bytes

    assert moved.sum(axis=0) == pytest.approx(8e6 * (1 + 2 * shares))
    assert moved.sum(axis=1) == pytest.approx(8e6 * (1 + 2 * shares))


def test_it_takes_a_little_more_than_the_closed_form():
    """As links are not full to the last moment; all-reduce is a ring."""
    for links in (LINKS, Links(np.array([155.0, 110, 80, 60]) * 125_000)):
        shares = optimal_shares(AGGREGATION, links)
        taken_s = play_exchange(AGGREGATION, links, shares).exchange_s
        formula_s = exchange_s(AGGREGATION, links, shares=shares)
        assert formula_s * (1 - 1e-6) <= taken_s <= 1.1 * formula_s
    assert play_exchange(AGGREGATION, LINKS, None).exchange_s == ring_s(AGGREGATION, LINKS)


def test_the_same_arguments_give_the_same_report():
    """Noise goes by seed."""
    one, other = (
        follow_links(SharePlanner(EqualShares(), AGGREGATION), [LINKS] * 5, noise=0.2, seed=4)
        for _ in range(2)
    )

    assert one.exchange_s.tolist() == other.exchange_s.tolist()
    assert one.events == other.events


def test_a_simulated_step_ends_with_its_exchange():
    """By all-reduce a ring after the slowest; in a simulated run as by itself."""
    compute_s = np.array([0.1, 0.2, 0.1, 0.1])
    plain_s = step_over_links_s(compute_s, AGGREGATION, LINKS)
    assert plain_s == pytest.approx(0.2 + ring_s(AGGREGATION, LINKS))

    case = {"aggregation": AGGREGATION, "links": LINKS, "shares": np.array([1, 1, 1, 0]) / 3}
    by_shares = partial(step_over_links_s, **case)
    workload = Workload(np.zeros(4), np.full((3, 4), 0.01))
    report = run("equal", Cluster(4, 40), workload, comm=by_shares)
    assert report.step_s == pytest.approx(np.full(3, by_shares(np.full(4, 0.1))))


def test_what_cannot_be_is_refused():
    """Overlaps past 1, and links of other ranks."""
    for shares in (None, np.full(4, 0.25)):
        with pytest.raises(ValueError, match=r"step_over_links_s\(overlap="):
            step_over_links_s(np.ones(4), AGGREGATION, LINKS, shares=shares, overlap=1.5)
        with pytest.raises(ValueError, match="4 ranks"):
            step_over_links_s(np.ones(4), AGGREGATION, Links(np.ones(3)), shares=shares)
        with pytest.raises(ValueError, match=r"compute_s.*have shape \(4,\)"):
            step_over_links_s(np.ones(3), AGGREGATION, LINKS, shares=shares)


V = 1_000_000


def case(bandwidths, *, chunks=None):
    """An aggregation and links; bandwidths in aggregations per second."""
    size = len(bandwidths)
    return Aggregation(size, V, num_chunks=chunks), Links(np.array(bandwidths) * float(V))


def test_no_samples_on_a_slow_link_make_a_step_longer():
    """Behind a common start, with the others ending together, smaller batches bring nothing."""
    aggregation, links = case([10, 10, 10, 2])
    shares = np.array([1, 1, 1, 0]) / 3
    with_all, without = (
        step_over_links_s(0.01 * np.array(sizes), aggregation, links, shares=shares)
        for sizes in ([16, 16, 16, 16], [64 / 3, 64 / 3, 64 / 3, 0])
    )

    # A fluid simulation gives .660 and .713.
    assert with_all == pytest.approx(0.660, rel=0.015)
    assert without == pytest.approx(0.713, rel=0.015)


@given(seed=st.integers(0, 2**31), chunks=st.sampled_from([1, 2, 8, None]))
def test_the_timeline_is_between_the_closed_forms(seed, chunks):
    """All done at once: no more than in lock-step, no less than every link is busy."""
    random = np.random.default_rng(seed)
    size = int(random.integers(2, 6))
    aggregation, links = case(random.uniform(2, 16, size), chunks=chunks)
    shares = random.dirichlet(np.ones(size))
    endless = Aggregation(size, V, num_chunks=None)
    taken_s = step_over_links_s(np.zeros(size), aggregation, links, shares=shares)

    assert taken_s >= exchange_s(endless, links, shares=shares) * (1 - 1e-9)
    if chunks is not None:
        assert taken_s <= exchange_s(aggregation, links, shares=shares) * (1 + 1e-9)


def test_later_gradients_never_end_a_step_earlier():
    """And overlap never ends it later."""
    aggregation, links = case([14, 6, 5, 9], chunks=8)
    shares = optimal_shares(aggregation, links)
    random = np.random.default_rng(0)
    for _ in range(50):
        compute_s = random.uniform(0, 0.5, 4)
        later_s = compute_s + random.uniform(0, 0.2, 4)
        one, other = (
            step_over_links_s(each, aggregation, links, shares=shares)
            for each in (compute_s, later_s)
        )
        hidden = step_over_links_s(compute_s, aggregation, links, shares=shares, overlap=0.7)
        assert hidden <= one <= other


SPEEDS = np.array([20.0, 30, 60, 80])
FIXED_S, STEPS, CLUSTER = np.full(4, 0.02), 60, Cluster(4, 64)
OVER_LINKS_AGGREGATION = Aggregation(4, 4_000_000, num_chunks=8)


def ran(mbit, *, noise=0.0, jitter=0.0, policy="lbb"):
    """A run on steady links; policies balance exactly unless there is jitter."""
    links = Links(np.array(mbit) * 125_000.0)
    luck = np.exp(np.random.default_rng(0).normal(0, jitter, (STEPS, 4)))
    return run_over_links(
        policy,
        CLUSTER,
        Workload(FIXED_S, np.tile(1 / SPEEDS, (STEPS, 1)), luck),
        [links] * STEPS,
        SharePlanner(OptimalShares(), OVER_LINKS_AGGREGATION),
        noise=noise,
    )


def test_sizes_balance_computing_and_shares_the_exchange():
    """The sizes of computing alone, and a step as long as the model of both says."""
    mbit = [150, 150, 150, 50]
    report, found = ran(mbit)
    sizes, shares = report.batch_size[-1], found.plans[-1].shares
    times, links = AffineTime(FIXED_S, 1 / SPEEDS), Links(np.array(mbit) * 125_000.0)

    assert shares is not None
    assert abs(sizes - allocate(times, CLUSTER)).max() <= 1  # a policy's own rounding
    by_shares, plain = (
        step_over_links_s(times.seconds(sizes), OVER_LINKS_AGGREGATION, links, shares=each)
        for each in (shares, None)
    )
    assert report.step_s[-1] == pytest.approx(by_shares)
    assert by_shares < 0.95 * plain


def test_the_same_arguments_give_the_same_run():
    """Noise and all."""
    settings = {"noise": 0.1, "jitter": 0.05, "policy": "auto"}
    (one, followed), (other, again) = (ran([200, 150, 100, 50], **settings) for _ in range(2))

    assert one.step_s.tolist() == other.step_s.tolist()
    assert followed.events == again.events


def test_what_does_not_fit_is_refused():
    """Other workers, and more links than steps."""
    links = Links(np.full(4, 1e6))
    shares = SharePlanner(OptimalShares(), Aggregation(4, 1_000_000))
    workload = Workload(FIXED_S, np.tile(1 / SPEEDS, (3, 1)))
    with pytest.raises(ValueError, match=r"sim.run\(cluster="):
        run_over_links("auto", Cluster(3, 9), workload, [links] * 3, shares)
    others = SharePlanner(OptimalShares(), Aggregation(3, 1_000_000))
    with pytest.raises(ValueError, match=r"run_over_links\(shares="):
        run_over_links("auto", CLUSTER, workload, [links] * 3, others)
    with pytest.raises(ValueError, match=r"run_over_links\(links="):
        run_over_links("auto", CLUSTER, workload, [links] * 4, shares)
