"""Times, closed forms and shares, against all messages and linear programs over every link."""

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.network import Aggregation, Links, exchange_s, optimal_shares
from evenstep.network._plans._duration import fair_rates, fair_transfers, ring_s
from evenstep.network._plans._optimum import alone, lower_bound_s, overlapped, solve_shares

from .reference import cases, counted_s, fewer, from_pairs, mesh, program_s, simple

NEAR = 2e-6  # what the solver leaves open


def best_s(case):
    """Seconds of the shares that are claimed to be optimal."""
    shares = optimal_shares(case.aggregation, case.links)
    return exchange_s(case.aggregation, case.links, shares=shares)


def form_s(case, within):
    """Seconds of a closed form's own shares."""
    return exchange_s(case.aggregation, case.links, shares=within.shares())


@pytest.mark.parametrize("kind", ["dedicated", "collocated", "mixed", "any"])
@fewer
@given(st.data())
def test_overlapped_shares_are_those_of_the_program(kind, data):
    """Without a limit to the chunks, with a bound, a formula and a program that agree."""
    half = data.draw(st.booleans())
    case = data.draw(cases(kind, chunks=(None,), pairs=False, half=half))

    seconds = form_s(case, overlapped(case.aggregation, case.links))

    assert seconds == pytest.approx(program_s(case), rel=NEAR)
    assert seconds == pytest.approx(lower_bound_s(case.aggregation, case.links), rel=1e-9)


@fewer
@given(cases("dedicated", chunks=(None,), pairs=True, half=False))
def test_dedicated_servers_behind_pairs_have_a_formula_too(case):
    """Shares in proportion to the slowest of a server's own link and its ways to workers."""
    seconds = form_s(case, overlapped(case.aggregation, case.links))

    assert seconds == pytest.approx(program_s(case), rel=NEAR)


@pytest.mark.parametrize("kind", ["dedicated", "collocated", "mixed", "any"])
@fewer
@given(st.data())
def test_a_barrier_on_links_as_fast_both_ways_has_a_formula(kind, data):
    """Pairs included: push and pull are one problem, twice."""
    case = data.draw(cases(kind, chunks=(1,), symmetric=True, half=False))

    seconds = form_s(case, alone(case.aggregation, case.links, pushes=True))

    assert seconds == pytest.approx(program_s(case), rel=NEAR)


@pytest.mark.parametrize("pushes", [True, False])
@pytest.mark.parametrize("pairs", [True, False])
@fewer
@given(st.data())
def test_a_phase_alone_is_that_of_its_program(pairs, pushes, data):
    """Whatever the roles, the directions and the pairs."""
    case = data.draw(cases(symmetric=False, pairs=pairs, half=False))
    within = alone(case.aggregation, case.links, pushes=pushes)
    weights = [1, 0, 0] if pushes else [0, 1, 0]

    assert within.seconds == pytest.approx(program_s(case, weights), rel=NEAR, abs=1e-15)


def test_a_pull_over_slow_ways_back_is_told_from_a_push():
    """Out of the one server of two workers, ten times slower than into it."""
    pair = [[0, 10, 10], [10, 0, 10], [1, 1, 0]]
    case = simple([100] * 3, helpers=1, dedicated=True, pair=pair, chunks=1)

    seconds = [alone(case.aggregation, case.links, pushes=way).seconds for way in (True, False)]

    assert seconds == pytest.approx([0.1, 1.0])
    assert best_s(case) == pytest.approx(1.1)


@fewer
@given(cases(symmetric=True, pairs=False, half=True))
def test_half_duplex_gains_as_much_behind_a_barrier(case):
    """One formula, in any number of chunks."""
    seconds = form_s(case, overlapped(case.aggregation, case.links))

    assert seconds == pytest.approx(program_s(case), rel=NEAR)


@fewer
@given(cases())
def test_the_optimum_is_that_of_the_program(case):
    """In every setting, and the bound is below it."""
    seconds, least_s = best_s(case), program_s(case)

    assert seconds == pytest.approx(least_s, rel=NEAR, abs=1e-15)
    assert lower_bound_s(case.aggregation, case.links) <= least_s * (1 + NEAR)


@fewer
@given(cases("collocated", chunks=(1,), symmetric=True, pairs=False, half=False))
def test_behind_a_barrier_equal_shares_are_optimal(case):
    """However unequal the links, as long as they are as fast both ways; a ring takes as long."""
    size = case.aggregation.world_size
    slowest = case.links.up_bytes_per_s.min()
    latency_s = 2 * case.links.latency_s
    expected = 2 * (size - 1) / size * case.aggregation.num_bytes / slowest

    assert optimal_shares(case.aggregation, case.links).tolist() == [1 / size] * size
    assert best_s(case) - latency_s == pytest.approx(expected)
    assert ring_s(case.aggregation, case.links) - (size - 1) * latency_s == pytest.approx(expected)


@pytest.mark.parametrize(
    ("bandwidths", "ring", "best", "shares"),
    [
        ([10] * 4, 0.15, 0.15, [1 / 4] * 4),
        ([10, 10, 10, 1], 1.5, 1.0, [1 / 3, 1 / 3, 1 / 3, 0]),
        ([10, 10, 10, 5], 0.3, 0.2, [1 / 3, 1 / 3, 1 / 3, 0]),
        ([10, 10, 8, 8], 0.1875, 1 / 6, [1 / 3, 1 / 3, 1 / 6, 1 / 6]),
        ([10, 5, 2.5, 1], 1.5, 1.0, [0.62069, 0.27586, 0.10345, 0]),
        ([25, 25, 10, 10], 0.15, 0.1, [1 / 2, 1 / 2, 0, 0]),
        ([25] * 7 + [10], 0.175, 0.1, [1 / 7] * 7 + [0]),
        ([100] * 4 + [25] * 4, 0.07, 0.04, [1 / 4] * 4 + [0] * 4),
        ([10] * 15 + [1], 1.875, 1.0, [1 / 15] * 15 + [0]),
        ([10, 1], 1.0, 1.0, [1 / 2, 1 / 2]),
    ],
)
def test_collocated_servers_worked_out_by_hand(bandwidths, ring, best, shares):
    """Overlapped without end: the gain over a ring stays below 2."""
    case = simple(bandwidths)

    assert ring_s(case.aggregation, case.links) == pytest.approx(ring)
    assert best_s(case) == pytest.approx(best)
    assert optimal_shares(case.aggregation, case.links) == pytest.approx(shares, abs=1e-5)


@pytest.mark.parametrize(
    ("bandwidths", "helpers", "best", "shares"),
    [
        ([10] * 6, 2, 0.12, [0.1] * 4 + [0.3] * 2),
        ([10, 10, 10, 5, 10], 1, 0.2, [1 / 4, 1 / 4, 1 / 4, 0, 1 / 4]),
        ([10, 10, 8, 8, 40], 1, 0.125, [1 / 12, 1 / 12, 0, 0, 10 / 12]),
    ],
)
def test_workers_with_helpers_worked_out_by_hand(bandwidths, helpers, best, shares):
    """One formula for servers on workers and servers of their own."""
    case = simple(bandwidths, helpers=helpers)

    assert best_s(case) == pytest.approx(best)
    assert optimal_shares(case.aggregation, case.links) == pytest.approx(shares)


@pytest.mark.parametrize(("num_workers", "num_helpers"), [(3, 1), (4, 2), (8, 3), (8, 8)])
def test_equal_links_with_helpers_give_the_theorem_of_byteps(num_workers, num_helpers):
    """Shares (n - k) and 2 (n - 1) over n^2 + kn - 2k, n workers and k helpers."""
    n, k = num_workers, num_helpers
    case = simple([10] * (n + k), helpers=k)
    expected = np.array([n - k] * n + [2 * (n - 1)] * k) / (n * n + k * n - 2 * k)

    shares = optimal_shares(case.aggregation, case.links)

    assert shares == pytest.approx(expected)


@pytest.mark.parametrize("chunks", [None, 1])
@pytest.mark.parametrize(
    ("workers", "servers", "equal", "best"),
    [
        ([10] * 4, [10, 10, 10, 2.5], 0.4, 0.12308),
        ([10] * 8, [40, 40, 10, 10], 0.2, 0.1),
        ([25] * 8, [100, 50, 25, 10], 0.2, 0.04324),
    ],
)
def test_dedicated_servers_worked_out_by_hand(workers, servers, equal, best, chunks):
    """Shares follow bandwidth, and a barrier doubles both times."""
    case = simple(workers + servers, helpers=len(servers), dedicated=True, chunks=chunks)
    even = np.array([0.0] * len(workers) + [1 / len(servers)] * len(servers))
    twice = 1 if chunks is None else 2

    assert exchange_s(case.aggregation, case.links, shares=even) == pytest.approx(twice * equal)
    assert best_s(case) == pytest.approx(twice * best, rel=1e-4)


@pytest.mark.parametrize(
    ("up", "down", "best", "shares"),
    [
        ([10, 10, 10, 2], [10] * 4, 0.5625, [0.3125] * 3 + [0.0625]),
        ([10] * 4, [10, 10, 10, 2], 0.5625, [0.3125] * 3 + [0.0625]),
        ([5, 10, 10, 2], [10, 5, 10, 10], 0.58, None),
    ],
)
def test_a_barrier_on_unequal_directions_worked_out_by_hand(up, down, best, shares):
    """Where a link is not as fast both ways, uneven shares gain without overlap too."""
    case = simple(up, down, chunks=1)

    assert best_s(case) == pytest.approx(best)
    if shares is not None:
        assert optimal_shares(case.aggregation, case.links) == pytest.approx(shares, abs=1e-6)


@pytest.mark.parametrize(
    ("pair", "equal", "best"),
    [
        (mesh(3, 10, (1, 2, 2)), 1 / 3, 1 / 11),
        (mesh(4, 10, (0, 3, 1), (1, 3, 1), (2, 3, 1)), 0.5, 1 / 3),
        (mesh(4, 2, (0, 1, 10), (2, 3, 10)), 0.25, 0.25),
    ],
)
def test_slow_pairs_worked_out_by_hand(pair, equal, best):
    """A slow pair, a slow rank by its pairs, and two sites, where shares cannot help."""
    size = len(pair)
    aggregation, links = Aggregation(size, 1000, num_chunks=None), from_pairs(pair)
    even = np.full(size, 1 / size)
    shares = optimal_shares(aggregation, links)

    assert exchange_s(aggregation, links, shares=even) == pytest.approx(equal)
    assert exchange_s(aggregation, links, shares=shares) == pytest.approx(best)
    if best == equal:
        assert shares.tolist() == even.tolist()


@fewer
@given(cases(pairs=False), st.floats(1e-3, 1e3))
def test_twice_the_bandwidth_takes_half_the_time(case, factor):
    """Latency apart."""
    given_links = case.links
    links = Links(given_links.up_bytes_per_s, given_links.down_bytes_per_s)
    faster = Links(factor * links.up_bytes_per_s, factor * links.down_bytes_per_s)
    one, other = (
        exchange_s(case.aggregation, each, shares=optimal_shares(case.aggregation, each))
        for each in (links, faster)
    )

    assert other * factor == pytest.approx(one, rel=NEAR)


@fewer
@given(cases(), st.integers(0, 2**31))
def test_more_bandwidth_never_costs_time(case, seed):
    """On one rank, at random."""
    links = case.links
    more = 1 + np.random.default_rng(seed).exponential(size=2)
    one = np.arange(links.world_size) == seed % links.world_size
    faster = Links(
        np.where(one, more[0], 1) * links.up_bytes_per_s,
        np.where(one, more[1], 1) * links.down_bytes_per_s,
        pair_bytes_per_s=links.pair_bytes_per_s,
        latency_s=links.latency_s,
        half_duplex=links.half_duplex,
    )
    shares = optimal_shares(case.aggregation, faster)

    after = exchange_s(case.aggregation, faster, shares=shares)

    assert after <= best_s(case) * (1 + NEAR) + 1e-15
    assert lower_bound_s(case.aggregation, faster) <= lower_bound_s(case.aggregation, links) * (
        1 + 1e-9
    )


def test_what_the_program_found_does_not_depend_on_the_numbering():
    """Several shares are as good here: those are taken that leave all the same part of room."""
    up, down = np.array([5, 10, 10, 2]), np.array([10, 5, 10, 10])
    first = simple(up, down, chunks=1)
    shares = optimal_shares(first.aggregation, first.links)
    for order in ([3, 2, 1, 0], [1, 3, 0, 2]):
        case = simple(up[order], down[order], chunks=1)

        assert optimal_shares(case.aggregation, case.links) == pytest.approx(
            shares[order], abs=1e-6
        )


def test_the_program_gives_nothing_to_ranks_that_only_work():
    """Though they have a share that they could do with."""
    works, serves = np.array([1, 1, 1, 0, 1], bool), np.array([0, 0, 0, 1, 1], bool)
    aggregation = Aggregation(5, 8, num_chunks=2, is_worker=works, is_server=serves)

    shares = solve_shares(aggregation, Links(np.array([9.0, 1, 1, 1, 1]), np.ones(5)))

    assert not shares[:3].any()
    assert shares.sum() == pytest.approx(1)


@pytest.mark.parametrize("chunks", [1, 4])
def test_a_helper_too_slow_to_help_does_no_harm(chunks):
    """A million times slower than the others: their shares are as exact as without it."""
    up, down = [10, 10, 8, 8], [9, 10, 7, 8]
    without = simple(up, down, chunks=chunks)

    seconds = best_s(simple([*up, 1e-5], [*down, 1e-5], helpers=1, chunks=chunks))

    assert seconds == pytest.approx(best_s(without), rel=1e-5)
    assert seconds <= best_s(without) * (1 + NEAR)


def test_equal_links_need_no_program(monkeypatch):
    """Nor do formulas that meet the bound: they work where scipy is not installed."""
    monkeypatch.setitem(sys.modules, "scipy", None)
    for bandwidths, chunks in (([10] * 4, 5), ([10, 10, 8, 8], None), ([10, 10, 10, 1], 1)):
        case = simple(bandwidths, chunks=chunks)

        assert best_s(case) > 0


def test_a_program_without_scipy_names_the_extra(monkeypatch):
    """A few chunks on unequal links have no formula."""
    monkeypatch.setitem(sys.modules, "scipy", None)
    case = simple([10, 10, 8, 8], chunks=4)

    with pytest.raises(ImportError, match=r"needs scipy: `pip install .*\[network\]\"`"):
        optimal_shares(case.aggregation, case.links)


def drawn_shares(case, seed):
    """Any shares of the case's servers."""
    weights = np.random.default_rng(seed).exponential(size=case.aggregation.world_size)
    weights *= case.aggregation.is_server
    return weights / weights.sum()


@given(cases(), st.integers(0, 2**31))
def test_every_message_is_counted(case, seed):
    """Up, down, half duplex, pairs and chunks: the time is that of the messages, link by link."""
    shares = drawn_shares(case, seed)

    seconds = exchange_s(case.aggregation, case.links, shares=shares)

    assert seconds == pytest.approx(counted_s(case, shares), rel=1e-12)


@pytest.mark.parametrize(
    ("bandwidths", "shares", "expected"),
    [
        ([10, 10, 10, 1], [1 / 3, 1 / 3, 1 / 3, 0], [2.0, 1.5, 1.3333, 1.25, 1.125, 1.0156]),
        ([10, 10, 8, 8], [1 / 3, 1 / 3, 1 / 6, 1 / 6], [0.2083, 0.1875, 0.1806, 0.1771, 0.1719]),
    ],
)
def test_chunks_come_near_the_limit_one_by_one(bandwidths, shares, expected):
    """In 1, 2, 3, 4, 8 and 64 chunks, of which the first does not overlap at all."""
    for chunks, seconds in zip((1, 2, 3, 4, 8, 64), expected, strict=False):
        case = simple(bandwidths, chunks=chunks)

        assert exchange_s(case.aggregation, case.links, shares=np.array(shares)) == pytest.approx(
            seconds, abs=6e-5
        )


def test_a_single_worker_that_serves_itself_sends_nothing():
    """Its gradient is the sum."""
    case = simple([10.0])

    assert exchange_s(case.aggregation, case.links, shares=np.ones(1)) == 0


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([0.5, 0.5], r"`exchange_s\(shares=...\)` must have shape \(3,\)"),
        ([0.5, 0.6, 0.0], "must be at least 0 and add up to 1"),
        ([1.5, -0.5, 0.0], "must be at least 0 and add up to 1"),
        ([np.nan, 0.5, 0.5], "must be at least 0 and add up to 1"),
        ([0.5, 0.0, 0.5], "must be 0 where a rank is no server, got 0.5 on rank 2"),
    ],
)
def test_shares_that_are_none_are_refused(shares, message):
    """By shape, sum, sign and role."""
    aggregation = Aggregation(3, 100, is_server=np.array([True, True, False]))

    with pytest.raises(ValueError, match=message):
        exchange_s(aggregation, Links(np.ones(3)), shares=np.array(shares))


def test_links_of_other_ranks_are_refused():
    """One bandwidth per rank."""
    with pytest.raises(ValueError, match=r"`exchange_s\(links=...\)` must speak of .* 3 ranks"):
        exchange_s(Aggregation(3, 100), Links(np.ones(2)), shares=np.ones(3) / 3)


def test_a_slow_pair_in_rank_order_sets_the_time():
    """Six ranks, one way 40 times slower than the others."""
    aggregation = Aggregation(6, 1200)

    assert ring_s(aggregation, from_pairs(mesh(6, 40))) == pytest.approx(0.05)
    assert ring_s(aggregation, from_pairs(mesh(6, 40, (0, 1, 1)))) == pytest.approx(2.0)
    assert ring_s(aggregation, from_pairs(mesh(6, 40, (0, 2, 1)))) == pytest.approx(0.05)


def test_half_duplex_takes_both_directions_in_turn():
    """And latency counts twice per worker that the ring has more than one."""
    case = simple([10] * 4, half=True)
    links = Links(case.links.up_bytes_per_s, latency_s=0.01, half_duplex=True)

    assert ring_s(case.aggregation, case.links) == pytest.approx(0.3)
    assert ring_s(case.aggregation, links) == pytest.approx(0.3 + 0.06)


def test_ranks_that_only_serve_are_no_part_of_it():
    """However slow they are."""
    case = simple([10] * 4 + [1], helpers=1)

    assert ring_s(case.aggregation, case.links) == pytest.approx(0.15)


def drawn(seed, size):
    """Links of unlike ranks, some pairs slow, and who sends to whom."""
    random = np.random.default_rng(seed)
    pair = np.where(random.random((size, size)) < 0.2, random.uniform(1, 20, (size, size)), np.inf)
    links = Links(
        random.uniform(20, 155, size), random.uniform(20, 155, size), pair_bytes_per_s=pair
    )
    active = random.random((size, size)) < 0.8
    np.fill_diagonal(active, False)
    return links, active


@fewer
@given(seed=st.integers(0, 2**31), size=st.integers(2, 9))
def test_each_transfer_is_limited_where_none_is_faster(seed, size):
    """By its pair, or by a full end on which it is among the fastest: so nobody could have more."""
    links, active = drawn(seed, size)
    rates = fair_rates(active, links)
    up, down = rates.sum(axis=1), rates.sum(axis=0)

    assert (up <= links.up_bytes_per_s * (1 + 1e-6)).all()
    assert (down <= links.down_bytes_per_s * (1 + 1e-6)).all()
    assert not rates[~active].any()
    for sender, receiver in np.argwhere(active):
        rate = rates[sender, receiver] * (1 + 1e-6)
        full_up = up[sender] >= links.up_bytes_per_s[sender] * (1 - 1e-6)
        full_down = down[receiver] >= links.down_bytes_per_s[receiver] * (1 - 1e-6)
        assert (
            rate >= links.pair_bytes_per_s[sender, receiver]
            or (full_up and rate >= rates[sender].max())
            or (full_down and rate >= rates[:, receiver].max())
        )


def test_a_known_network():
    """Four ranks that all send to all: the slowest is shared first, then what it left."""
    links = Links(np.array([200.0, 150, 100, 50]))
    rates = fair_rates(~np.eye(4, dtype=np.bool_), links)

    slow, third = 50 / 3, (100 - 50 / 3) / 2
    assert rates[0] == pytest.approx([0, 150 - slow - third, third, slow])


def test_what_ends_first_leaves_its_part_to_the_others():
    """1 and 3 bytes over a link of 2: the first takes 1 s, the other 2 s in all."""
    num_bytes = np.zeros((3, 3))
    num_bytes[1, 0], num_bytes[2, 0] = 1, 3
    taken_s, (up, down) = fair_transfers(num_bytes, Links(np.array([2.0, 9, 9])))

    assert taken_s[[1, 2], 0] == pytest.approx([1, 2], rel=0.02)
    assert down[0] == pytest.approx(2)
    assert up.tolist() == pytest.approx([0, 1, 2])


@fewer
@given(seed=st.integers(0, 2**31), size=st.integers(2, 8))
def test_an_exchange_takes_no_less_than_its_closed_form_and_little_more(seed, size):
    """Links that are not full to the last moment cost some per cent."""
    random = np.random.default_rng(seed)
    links = Links(random.uniform(20, 155, size))
    shares = random.dirichlet(np.full(size, 2.0))
    push = np.outer(np.ones(size), shares)
    formula_s = exchange_s(Aggregation(size, 4, num_chunks=None), links, shares=shares) / 4
    taken_s = fair_transfers(push + push.T, links)[0].max()

    assert formula_s * (1 - 1e-6) <= taken_s <= 1.35 * formula_s
