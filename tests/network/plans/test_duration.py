"""The times of an exchange, a ring and fair transfers, against all messages one by one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.network import Aggregation, Links, exchange_s
from evenstep.network._plans._duration import fair_rates, fair_transfers, ring_s

from .reference import cases, counted_s, fewer, from_pairs, mesh, simple


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
    taken = fair_transfers(num_bytes, Links(np.array([2.0, 9, 9])))

    assert taken.seconds[[1, 2], 0] == pytest.approx([1, 2], rel=0.02)
    assert taken.down_bytes_per_s[0] == pytest.approx(2)
    assert taken.up_bytes_per_s.tolist() == pytest.approx([0, 1, 2])


@fewer
@given(seed=st.integers(0, 2**31), size=st.integers(2, 8))
def test_an_exchange_takes_no_less_than_its_closed_form_and_little_more(seed, size):
    """Links that are not full to the last moment cost some per cent."""
    random = np.random.default_rng(seed)
    links = Links(random.uniform(20, 155, size))
    shares = random.dirichlet(np.full(size, 2.0))
    push = np.outer(np.ones(size), shares)
    formula_s = exchange_s(Aggregation(size, 4, num_chunks=None), links, shares=shares) / 4
    taken_s = fair_transfers(push + push.T, links).seconds.max()

    assert formula_s * (1 - 1e-6) <= taken_s <= 1.35 * formula_s


def test_bytes_that_cannot_be_are_refused():
    """With the shape that was wanted."""
    for wrong in (np.zeros((2, 2)), np.full((3, 3), -1.0), np.full((3, 3), np.nan)):
        with pytest.raises(ValueError, match=r"fair_transfers\(num_bytes=...\)"):
            fair_transfers(wrong, Links(np.ones(3)))
