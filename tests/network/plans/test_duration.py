"""The model of an exchange, against every message counted by itself."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.network import Aggregation, Links, exchange_s

from .reference import cases, counted_s, simple


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
