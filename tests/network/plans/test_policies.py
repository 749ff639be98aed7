"""Facts special to one share policy; what holds for all is in the contract."""

import sys

import numpy as np
import pytest

from evenstep.network import (
    EqualShares,
    Links,
    OptimalShares,
    ProportionalShares,
    exchange_s,
    optimal_shares,
)

from .reference import mesh, simple


def test_optimal_shares_are_held_until_others_are_clearly_faster():
    """A slow rank's link that loses a tenth is no reason, one that loses half is."""
    policy, case = OptimalShares(margin=0.1), simple([10, 10, 10, 8])
    first = policy.update(case.aggregation, case.links, policy.init(case.aggregation).state)
    a_little, a_lot = simple([10, 10, 10, 7.5]), simple([10, 10, 10, 4])

    held = policy.update(case.aggregation, a_little.links, first.state)
    moved = policy.update(case.aggregation, a_lot.links, held.state)

    assert first.reason == "optimal: 0.158 s instead of 0.188 s"
    assert held.shares.tolist() == first.shares.tolist()
    assert held.reason.startswith("held: ")
    assert moved.shares == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
    assert moved.reason.startswith("optimal: 0.25 s instead of ")


def test_without_scipy_shares_have_a_formula(monkeypatch):
    """Links as they are measured have none that is proven best: these are 2 % slower at most."""
    case = simple([10, 10.1, 9.9, 2], [9.8, 10, 10.2, 2.1], chunks=16)
    policy, best = OptimalShares(), optimal_shares(case.aggregation, case.links)
    monkeypatch.setitem(sys.modules, "scipy", None)
    decision = policy.update(case.aggregation, case.links, policy.init(case.aggregation).state)
    found_s, best_s, equal_s = (
        exchange_s(case.aggregation, case.links, shares=shares)
        for shares in (decision.shares, best, np.full(4, 0.25))
    )

    assert found_s <= 1.02 * best_s
    assert equal_s >= 1.2 * best_s
    assert decision.reason.startswith("by formula, as there is no scipy: ")


def test_shares_follow_the_slowest_way_to_a_server():
    """In either direction, over the pair and both ranks' own links."""
    pair = mesh(3, 10, (1, 2, 2)) / 1000
    pair[0, 1] = 4
    case = simple([8, 10, 10], pair=pair)
    policy = ProportionalShares()

    decision = policy.update(case.aggregation, case.links, policy.init(case.aggregation).state)

    assert decision.shares.tolist() == [4 / 8, 2 / 8, 2 / 8]
    assert decision.reason == "proportional: rank 1's slowest link carries 2e+03 bytes/s"


def test_the_papers_rule_is_optimal_for_dedicated_servers():
    """Whose links are the slowest on every way: in proportion to them."""
    case = simple([100] * 4 + [10, 10, 10, 2.5], helpers=4, dedicated=True)
    policy = ProportionalShares()

    decision = policy.update(case.aggregation, case.links, policy.init(case.aggregation).state)

    assert decision.shares[4:] == pytest.approx(np.array([4, 4, 4, 1]) / 13)


def test_the_papers_rule_is_blind_to_a_slow_rank_among_collocated_servers():
    """It is the slowest way of all others too, so all score alike, where 1.5 could be gained."""
    case = simple([10, 10, 10, 1])
    policies = (EqualShares(), ProportionalShares(), OptimalShares())

    seconds = [
        exchange_s(
            case.aggregation,
            case.links,
            shares=policy.update(
                case.aggregation, case.links, policy.init(case.aggregation).state
            ).shares,
        )
        for policy in policies
    ]

    assert seconds == pytest.approx([1.5, 1.5, 1.0])


def test_the_papers_rule_follows_changes_past_its_threshold():
    """The mean over servers counts, against the links that the shares in force were made for."""
    policy = ProportionalShares(threshold=0.1)
    case = simple([100] * 2 + [10, 10], helpers=2, dedicated=True)
    first = policy.update(case.aggregation, case.links, policy.init(case.aggregation).state)
    near, far = (simple([100] * 2 + [10, x], helpers=2, dedicated=True) for x in (8.5, 7.5))

    held = policy.update(case.aggregation, near.links, first.state)
    moved = policy.update(case.aggregation, far.links, held.state)

    assert held.shares[2:].tolist() == [0.5, 0.5]
    assert held.reason == "held: links changed by 7.5% on average"
    assert moved.shares[2:] == pytest.approx([10 / 17.5, 7.5 / 17.5])


@pytest.mark.parametrize("value", [-0.1, np.nan, np.inf])
def test_settings_out_of_range_are_refused(value):
    """With the class and the argument."""
    with pytest.raises(ValueError, match=r"`OptimalShares\(margin=...\)` must be finite"):
        OptimalShares(margin=value)
    with pytest.raises(ValueError, match=r"`ProportionalShares\(threshold=...\)` must be finite"):
        ProportionalShares(threshold=value)


def test_a_single_rank_keeps_everything():
    """It has nobody to send to, and no link to score but its own."""
    case = simple([10.0])
    for policy in (EqualShares(), OptimalShares(), ProportionalShares()):
        state = policy.init(case.aggregation).state

        assert policy.update(case.aggregation, Links(np.ones(1)), state).shares.tolist() == [1]
