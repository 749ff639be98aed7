"""When a step ends that computes and exchanges at once: between the closed forms, and monotone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.network import Aggregation, Links, exchange_s, optimal_shares
from evenstep.network.sim._shared_links import timeline_s

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
        timeline_s(0.01 * np.array(sizes), aggregation, links, shares=shares)
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
    taken_s = timeline_s(np.zeros(size), aggregation, links, shares=shares)

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
            timeline_s(each, aggregation, links, shares=shares) for each in (compute_s, later_s)
        )
        hidden = timeline_s(compute_s, aggregation, links, shares=shares, overlap=0.7)
        assert hidden <= one <= other


def test_an_overlap_out_of_range_is_refused():
    """By name."""
    aggregation, links = case([1, 1, 1])
    with pytest.raises(ValueError, match=r"timeline_s\(overlap="):
        timeline_s(np.zeros(3), aggregation, links, shares=np.ones(3) / 3, overlap=2)
