"""When a plan is carried out, when it falls back, and what it says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.network import exchange_s, optimal_shares, plan_shares
from evenstep.network._plans._duration import ring_s

from .reference import cases, simple


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
    assert plan.exchange_s == exchange_s(case.aggregation, case.links, shares=plan.shares)


def test_a_plan_that_gains_says_how_much():
    """One slow rank among four, in eight chunks."""
    case = simple([10, 10, 10, 1], chunks=8)

    plan = planned(case)

    assert not plan.falls_back
    assert plan.parts == (349526, 349525, 349525, 0)
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
