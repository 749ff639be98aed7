"""When a plan is carried out, when it falls back, and what it says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.network import Aggregation, Links, exchange_s, optimal_shares, plan_shares, ring_s

from .reference import cases, mesh, simple


def planned(case, **settings):
    """The plan of the optimal shares."""
    shares = optimal_shares(case.aggregation, case.links)
    return plan_shares(case.aggregation, case.links, shares=shares, **settings)


@given(cases(), st.sampled_from([0.0, 0.15, 1.0]))
def test_a_plan_is_never_predicted_to_lose(case, margin):
    """It is carried out only where a ring takes longer by the margin, and predicts its integers."""
    plan = planned(case, margin=margin)

    assert plan.falls_back == (not plan.ring_s > plan.exchange_s * (1 + margin))
    assert plan.reason.startswith("plain all-reduce: " if plan.falls_back else "shares: ")
    assert plan.ring_s == ring_s(case.aggregation, case.links)
    assert plan.best_ring_s <= plan.ring_s * (1 + 1e-12)
    assert plan.lower_bound_s <= plan.exchange_s * (1 + 3e-6) + 1e-15
    assert plan.exchange_s == exchange_s(case.aggregation, case.links, shares=plan.shares)


def test_a_plan_that_gains_says_how_much():
    """One slow rank among four, in eight chunks."""
    case = simple([10, 10, 10, 1], chunks=8)

    plan = planned(case)

    assert not plan.falls_back
    assert plan.edges.tolist() == [0, 334, 667, 1000, 1000]
    assert plan.reason == "shares: 1.12 s against 1.5 s of a ring, 1.33 times as fast"
    assert plan.gain == pytest.approx(4 / 3)


@pytest.mark.parametrize(
    ("bandwidths", "chunks", "reason"),
    [
        ([10] * 4, None, "plain all-reduce: no shares gain 15% here, these take 0.15 s against"),
        ([10, 10, 10, 1], 1, "plain all-reduce: no shares gain 15% here, these take 1.5 s against"),
        ([10, 10, 8, 8], None, "plain all-reduce: no shares gain 15% here, these take 0.167 s"),
        ([10, 10, 10, 5], 2, "plain all-reduce: these shares take 0.3 s against 0.3 s of a ring"),
    ],
)
def test_a_plan_that_does_not_gain_falls_back_and_says_so(bandwidths, chunks, reason):
    """On equal links, behind a barrier, where the margin is missed and where chunks are few."""
    plan = planned(simple(bandwidths, chunks=chunks))

    assert plan.falls_back
    assert plan.reason.startswith(reason)


def test_the_smallest_size_is_in_the_prediction():
    """Rank 3's 167 bytes are too few to bother, and what the others then take longer counts."""
    case = simple([10, 10, 8, 8])
    aggregation = Aggregation(4, 1000, num_chunks=None, min_bytes=200, element_bytes=1)

    plan = plan_shares(aggregation, case.links, shares=optimal_shares(case.aggregation, case.links))

    assert np.diff(plan.edges).tolist() == [400, 400, 200, 0]
    assert plan.exchange_s == pytest.approx(0.18)


def test_a_better_order_of_the_ring_is_told():
    """Where it does more than shares, it is the cheaper change."""
    aggregation, links = Aggregation(6, 1200), Links.from_pairs(mesh(6, 40, (0, 1, 1), (2, 3, 1)))

    plan = plan_shares(aggregation, links, shares=np.full(6, 1 / 6))

    assert plan.best_ring_s == pytest.approx(0.05)
    assert plan.reason.endswith("a ring in another order would take 0.05 s")


def test_a_single_worker_has_nothing_to_sum():
    """With a server of its own or without."""
    for helpers in (0, 1):
        case = simple([10] * (1 + helpers), helpers=helpers)
        plan = planned(case)

        assert plan.falls_back
        assert plan.gain == 1
        assert plan.reason == "plain all-reduce: a single worker has nothing to sum"


@pytest.mark.parametrize("margin", [-0.1, np.nan, np.inf])
def test_a_margin_out_of_range_is_refused(margin):
    """With what it means."""
    with pytest.raises(ValueError, match=r"`plan_shares\(margin=...\)` must be finite .* is 15 %"):
        planned(simple([1, 1]), margin=margin)
