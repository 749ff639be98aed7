"""What every share policy promises, and what is special to one."""

import inspect
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import network
from evenstep._run._estimates import decode, encode
from evenstep.network import (
    Aggregation,
    EqualShares,
    Links,
    OptimalShares,
    ProportionalShares,
    Split,
    exchange_s,
    optimal_shares,
)
from evenstep.network._plans._share_policies import AbstractSharePolicy

from .reference import cases, fewer, mesh, simple

EXPORTED = [
    cls()
    for cls in (getattr(network, name) for name in network.__all__)
    if inspect.isclass(cls) and issubclass(cls, AbstractSharePolicy) and not inspect.isabstract(cls)
]
every_policy = pytest.mark.parametrize("policy", EXPORTED, ids=lambda policy: policy.name)


def decided(policy, aggregation, *measured):
    """The decision after some measurements, one at least."""
    state = policy.init(aggregation)
    for links in measured:
        decision = policy.update(aggregation, links, state)
        state = decision.state
    return decision


def renumbered(case, order):
    """The same ranks in another order."""
    aggregation, links = case.aggregation, case.links
    pair = links.pair_bytes_per_s
    return (
        Aggregation(
            aggregation.world_size,
            aggregation.num_bytes,
            num_chunks=aggregation.num_chunks,
            is_worker=aggregation.is_worker[order],
            is_server=aggregation.is_server[order],
        ),
        Links(
            links.up_bytes_per_s[order],
            links.down_bytes_per_s[order],
            pair_bytes_per_s=None if pair is None else pair[np.ix_(order, order)],
            latency_s=links.latency_s,
            half_duplex=links.half_duplex,
        ),
    )


def test_there_are_three():
    """With names of their own."""
    assert [policy.name for policy in EXPORTED] == ["equal", "optimal", "proportional"]


@every_policy
@fewer
@given(case=cases())
def test_shares_are_shares(policy, case):
    """At least 0, adding up to 1, of servers alone."""
    decision = decided(policy, case.aggregation, case.links)

    assert (decision.shares >= 0).all()
    assert decision.shares.sum() == pytest.approx(1, abs=1e-12)
    assert not decision.shares[~case.aggregation.is_server].any()
    assert decision.reason.strip()


@every_policy
@fewer
@given(case=cases(), least=st.integers(0, 10**8))
def test_ranges_tile_the_bytes(policy, case, least):
    """Every element once, none too small and only by servers, whatever the policy decided."""
    shares = decided(policy, case.aggregation, case.links).shares
    split = Split.of(shares, chunk_bytes=2 * case.aggregation.num_bytes, min_bytes=least)
    (edges,) = split.chunks(case.aggregation.num_bytes, 2)
    sizes = np.diff(edges)

    assert (edges[0], edges[-1]) == (0, case.aggregation.num_bytes)
    assert (sizes >= 0).all()
    assert not sizes[~case.aggregation.is_server].any()
    assert np.count_nonzero(sizes) == 1 or 2 * sizes[sizes > 0].min() >= least


# At the edge of a margin the last bit of a time decides.
@pytest.mark.parametrize("policy", [OptimalShares(margin=0), ProportionalShares()])
@fewer
@given(case=cases(), seed=st.integers(0, 2**31))
def test_numbering_does_not_matter(policy, case, seed):
    """Renumbered ranks take as long, and have the same shares where no pair makes them tie."""
    order = np.random.default_rng(seed).permutation(case.aggregation.world_size)
    aggregation, links = renumbered(case, order)

    one = decided(policy, case.aggregation, case.links).shares
    other = decided(policy, aggregation, links).shares

    one_s = exchange_s(case.aggregation, case.links, shares=one)
    assert exchange_s(aggregation, links, shares=other) == pytest.approx(one_s, rel=3e-6)
    if links.pair_bytes_per_s is None:
        assert other == pytest.approx(one[order], abs=1e-5)


@every_policy
@pytest.mark.parametrize("chunks", [None, 1, 7])
@pytest.mark.parametrize("half", [False, True])
def test_equal_links_stay_equal(policy, chunks, half):
    """Exactly, for pairs as for ranks, and however often they are measured."""
    pair = np.full((6, 6), 3.0)
    for case in (simple([10] * 6, chunks=chunks, half=half), simple([10] * 6, pair=pair)):
        decision = decided(policy, case.aggregation, case.links, case.links)

        assert decision.shares.tolist() == [1 / 6] * 6


@every_policy
@fewer
@given(case=cases())
def test_the_same_links_give_the_same_decision(policy, case):
    """Nothing but the arguments counts, a state that was written and read included."""
    first = decided(policy, case.aggregation, case.links)
    state = decode(encode(first.state))

    again = decided(policy, case.aggregation, case.links)
    one = policy.update(case.aggregation, case.links, first.state)
    other = policy.update(case.aggregation, case.links, state)

    assert again.shares.tolist() == first.shares.tolist()
    assert encode(again.state) == encode(first.state)
    assert other.shares.tolist() == one.shares.tolist()
    assert other.reason == one.reason


@pytest.mark.parametrize("policy", [OptimalShares(), ProportionalShares()])
def test_links_of_other_ranks_are_refused(policy):
    """By those that look at them."""
    aggregation = Aggregation(3, 100)
    with pytest.raises(ValueError, match=r"\(links=...\)` must speak of the aggregation's 3 ranks"):
        decided(policy, aggregation, Links(np.ones(2)))


@fewer
@given(case=cases())
def test_optimal_shares_are_never_slower_than_the_others(case):
    """By the model; with a margin, by no more than that."""
    aggregation, links = case.aggregation, case.links
    for margin in (0.0, 0.2):
        shares = decided(OptimalShares(margin=margin), aggregation, links).shares
        seconds = exchange_s(aggregation, links, shares=shares)
        for policy in EXPORTED:
            others = decided(policy, aggregation, links).shares
            others_s = exchange_s(aggregation, links, shares=others)

            assert seconds <= others_s * (1 + margin) * (1 + 3e-6) + 1e-15


def test_optimal_shares_are_held_until_others_are_clearly_faster():
    """A slow rank's link that loses a tenth is no reason, one that loses half is."""
    policy, case = OptimalShares(margin=0.1), simple([10, 10, 10, 8])
    first = policy.update(case.aggregation, case.links, policy.init(case.aggregation))
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
    decision = policy.update(case.aggregation, case.links, policy.init(case.aggregation))
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

    decision = policy.update(case.aggregation, case.links, policy.init(case.aggregation))

    assert decision.shares.tolist() == [4 / 8, 2 / 8, 2 / 8]
    assert decision.reason == "proportional: rank 1's slowest link carries 2e+03 bytes/s"


def test_the_papers_rule_is_optimal_for_dedicated_servers():
    """Whose links are the slowest on every way: in proportion to them."""
    case = simple([100] * 4 + [10, 10, 10, 2.5], helpers=4, dedicated=True)
    policy = ProportionalShares()

    decision = policy.update(case.aggregation, case.links, policy.init(case.aggregation))

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
                case.aggregation, case.links, policy.init(case.aggregation)
            ).shares,
        )
        for policy in policies
    ]

    assert seconds == pytest.approx([1.5, 1.5, 1.0])


def test_the_papers_rule_follows_changes_past_its_threshold():
    """The mean over servers counts, against the links that the shares in force were made for."""
    policy = ProportionalShares(threshold=0.1)
    case = simple([100] * 2 + [10, 10], helpers=2, dedicated=True)
    first = policy.update(case.aggregation, case.links, policy.init(case.aggregation))
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
        state = policy.init(case.aggregation)

        assert policy.update(case.aggregation, Links(np.ones(1)), state).shares.tolist() == [1]
